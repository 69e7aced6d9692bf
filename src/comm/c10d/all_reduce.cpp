#include <cstring>
#include <utility>

#include <ATen/ops/view_as_real.h>

#include "base/caller.h"
#include "base/view_into.h"
#include "comm/arguments.h"
#include "comm/c10d/over_channel.h"
#include "comm/payload.h"
#include "comm/queued.h"
#include "comm/reduce.h"

namespace fsdp::adapter {
namespace {

// Below, a message's latency is all that counts: one exchange beats the many steps of a ring.
constexpr int64_t kSmallBytes = 64 * 1024;
// The same for what the backend does not combine: bytes that one exchange brings to each rank.
constexpr int64_t kSmallExchange = 1024 * 1024;

/// The backend combines.
class BackendAllReduce final : public StreamedWork {
 public:
  BackendAllReduce(
      const std::shared_ptr<Channel>& channel, at::Tensor tensor, ReduceOp op, double divide_by, const Label& label)
      : StreamedWork(tensor.device()),
        tensor_(std::move(tensor)),
        division_(divide_by, tensor_.scalar_type(), /*sum_may_overflow=*/op == ReduceOp::kSum) {
    divide_(tensor_, division_.before);
    pending_ = channel->start(label, "all-reduce", tensor_.device(), tensor_.nbytes(), [&](Collectives& c) {
      return c.all_reduce(tensor_, op);
    });
  }

 private:
  void conclude() override {
    divide_(tensor_, division_.after);
  }

  at::Tensor tensor_;
  Division division_;
};

int64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.nbytes());
}

/// Every rank gets everything and combines it on the host, in rank order.
class GatheredAllReduce final : public StreamedWork {
 public:
  GatheredAllReduce(
      const std::shared_ptr<Channel>& channel, at::Tensor tensor, ReduceOp op, double divide_by, const Label& label)
      : StreamedWork(c10::kCPU),
        tensor_(std::move(tensor)),
        op_(op),
        divide_by_(divide_by),
        ranks_(channel->size()),
        received_(tensor_.new_empty({ranks_ * bytes_of(tensor_)}, at::kByte)) {
    const at::Tensor input = view_into(tensor_, at::kByte, bytes_of(tensor_));
    pending_ = channel->start(label, "all-reduce", c10::kCPU, bytes_of(tensor_), [&](Collectives& c) {
      return c.all_gather(received_, input);
    });
  }

 private:
  void conclude() override {
    reduce(tensor_, rows_of(received_.const_data_ptr(), bytes_of(tensor_), ranks_), op_, divide_by_);
    received_.reset();
  }

  at::Tensor tensor_;
  ReduceOp op_;
  double divide_by_;
  int ranks_;
  at::Tensor received_;
};

/// Every rank combines a part on the host, in rank order, and the parts are gathered: each rank gets twice the tensor,
/// however many ranks there are. The first half is over once this is made: all ranks have to start the second one at
/// the same place among their collectives, and who waits first is not the same everywhere.
class PartedAllReduce final : public StreamedWork {
 public:
  PartedAllReduce(
      std::shared_ptr<Channel> channel, at::Tensor tensor, ReduceOp op, double divide_by, const Label& label)
      : StreamedWork(c10::kCPU),
        channel_(std::move(channel)),
        tensor_(std::move(tensor)),
        part_bytes_(align_up((bytes_of(tensor_) + channel_->size() - 1) / channel_->size(), kSendAlignment)),
        parts_(channel_->pool().take(part_bytes_ * channel_->size(), c10::kCPU)),
        received_(channel_->pool().take(part_bytes_ * channel_->size(), c10::kCPU)) {
    char* const parts = static_cast<char*>(parts_.mutable_data_ptr());
    std::memcpy(parts, tensor_.const_data_ptr(), tensor_.nbytes());
    std::memset(parts + bytes_of(tensor_), 0, part_bytes_ * channel_->size() - bytes_of(tensor_));
    exchange_parts(label);
    const at::Tensor mine = view_into(received_, tensor_.scalar_type(), part_bytes_ / tensor_.element_size());
    reduce(mine, rows_of(received_.const_data_ptr(), part_bytes_, channel_->size()), op, divide_by);
    pending_ = start(
        label, [&](Collectives& c) { return c.all_gather(all_of(parts_), view_into(mine, at::kByte, part_bytes_)); });
  }

 private:
  void conclude() override {
    std::memcpy(tensor_.mutable_data_ptr(), parts_.const_data_ptr(), tensor_.nbytes());
    channel_->pool().give_back(std::exchange(parts_, at::Tensor()));
    channel_->pool().give_back(std::exchange(received_, at::Tensor()));
  }

  void exchange_parts(const Label& label) {
    const WithoutCallersLock no_callers_lock;
    start(label, [&](Collectives& c) { return c.all_to_all(all_of(received_), all_of(parts_)); }).finish();
  }

  Pending start(const Label& label, const Channel::Start& call) {
    return channel_->start(label, "all-reduce", c10::kCPU, bytes_of(tensor_), call);
  }

  at::Tensor all_of(const at::Tensor& buffer) const { // the pool's may be longer
    return view_into(buffer, at::kByte, part_bytes_ * channel_->size());
  }

  std::shared_ptr<Channel> channel_;
  at::Tensor tensor_;
  int64_t part_bytes_;
  at::Tensor parts_; // this rank's numbers, then the results; from the pool
  at::Tensor received_; // all ranks' numbers of this rank's part; from the pool
};

/// In one exchange each rank gets as many times the tensor as there are ranks, which for two is no more than in two.
bool takes_one_exchange(const at::Tensor& tensor, int ranks) {
  return host_backends_combine(tensor.scalar_type()) ? bytes_of(tensor) <= kSmallBytes
                                                     : ranks == 2 || bytes_of(tensor) * ranks <= kSmallExchange;
}

} // namespace

std::unique_ptr<Work> start_all_reduce(
    std::shared_ptr<Channel> channel, at::Tensor tensor, ReduceOp op, double divide_by, const Label& label) {
  const c10::NoGradGuard no_grad;
  check_all_reduce(tensor, op, label);
  if (tensor.numel() == 0) {
    return std::make_unique<Queued>(c10::kCPU); // nothing to do on any rank
  }
  if (tensor.is_complex()) {
    tensor = at::view_as_real(tensor);
  }
  const bool on_host = tensor.device().is_cpu() && host_combines(tensor.scalar_type());
  if (on_host && takes_one_exchange(tensor, channel->size())) {
    return std::make_unique<GatheredAllReduce>(channel, std::move(tensor), op, divide_by, label);
  }
  const bool loses_nans = op != ReduceOp::kSum && tensor.is_floating_point(); // as Gloo does
  if (on_host && (loses_nans || !host_backends_combine(tensor.scalar_type()))) {
    return std::make_unique<PartedAllReduce>(std::move(channel), std::move(tensor), op, divide_by, label);
  }
  return std::make_unique<BackendAllReduce>(channel, std::move(tensor), op, divide_by, label);
}

} // namespace fsdp::adapter
