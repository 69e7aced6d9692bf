#include "comm/c10d/all_reduce.h"

#include <utility>
#include <vector>

#include "comm/c10d/host_combine.h"
#include "comm/c10d/streamed_work.h"
#include "comm/divide.h"

namespace fsdp::adapter {
namespace {

// Below, a message's latency is all that counts: one exchange beats the many steps of a ring.
constexpr size_t kSmallBytes = 64 * 1024;

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

/// Every rank gets everything and combines it on the host, in rank order.
class HostAllReduce final : public StreamedWork {
 public:
  HostAllReduce(
      const std::shared_ptr<Channel>& channel, at::Tensor tensor, ReduceOp op, double divide_by, const Label& label)
      : StreamedWork(c10::kCPU),
        tensor_(std::move(tensor)),
        op_(op),
        divide_by_(divide_by),
        received_(tensor_.new_empty({channel->size() * static_cast<int64_t>(tensor_.nbytes())}, at::kByte)) {
    const at::Tensor input = tensor_.view({-1}).view(at::kByte);
    pending_ = channel->start(label, "all-reduce", c10::kCPU, tensor_.nbytes(), [&](Collectives& c) {
      return c.all_gather(received_, input);
    });
  }

 private:
  void conclude() override {
    const char* base = static_cast<const char*>(received_.const_data_ptr());
    std::vector<const void*> sources;
    for (int64_t begin = 0; begin < received_.numel(); begin += tensor_.nbytes()) {
      sources.push_back(base + begin);
    }
    combine_on_host(tensor_, sources, op_, divide_by_);
    received_.reset();
  }

  at::Tensor tensor_;
  ReduceOp op_;
  double divide_by_;
  at::Tensor received_;
};

bool combine_here(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && combines_on_host(tensor.scalar_type()) &&
         (tensor.nbytes() <= kSmallBytes || !host_backends_combine(tensor.scalar_type()));
}

} // namespace

std::unique_ptr<Work> start_all_reduce(
    std::shared_ptr<Channel> channel, at::Tensor tensor, ReduceOp op, double divide_by, const Label& label) {
  const c10::NoGradGuard no_grad;
  if (tensor.numel() == 0) {
    return std::make_unique<NoWork>();
  }
  if (combine_here(tensor)) {
    return std::make_unique<HostAllReduce>(channel, std::move(tensor), op, divide_by, label);
  }
  return std::make_unique<BackendAllReduce>(channel, std::move(tensor), op, divide_by, label);
}

} // namespace fsdp::adapter
