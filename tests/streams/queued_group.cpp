#include "streams/queued_group.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/c10d/factory.h"
#include "streams/queued_device.h"

namespace fsdp::testing {

/// Each rank brings something and sees what the others brought.
class MeetingPlace {
 public:
  explicit MeetingPlace(int ranks) : ranks_(ranks), brought_(ranks) {}

  std::vector<at::Tensor> exchange(int rank, const at::Tensor& mine) {
    std::unique_lock lock(mutex_);
    brought_[rank] = mine;
    arrive(lock);
    return brought_;
  }

  /// Where some of the ranks meet, who have one store.
  std::shared_ptr<MeetingPlace> part(c10d::Store& store, int rank, int ranks) {
    if (rank == 0) {
      std::lock_guard lock(mutex_);
      store.set("part", std::to_string(parts_.size()));
      parts_.push_back(make_meeting_place(ranks));
    }
    const size_t index = std::stoul(store.get_to_str("part"));
    std::lock_guard lock(mutex_);
    return parts_[index];
  }
  const c10::intrusive_ptr<c10d::Store>& store() const {
    return store_;
  }

  /// Returns when all ranks are here.
  void meet() {
    std::unique_lock lock(mutex_);
    arrive(lock);
  }

 private:
  void arrive(std::unique_lock<std::mutex>& lock) {
    const int64_t round = round_;
    if (++here_ == ranks_) {
      here_ = 0;
      ++round_;
      all_here_.notify_all();
      return;
    }
    const bool met = all_here_.wait_for(lock, std::chrono::seconds(30), [&] { return round_ != round; });
    TORCH_CHECK(met, "a rank did not come to a collective");
  }

  std::mutex mutex_;
  std::condition_variable all_here_;
  int ranks_;
  int here_ = 0;
  int64_t round_ = 0;
  std::vector<at::Tensor> brought_;
  std::vector<std::shared_ptr<MeetingPlace>> parts_;
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

std::shared_ptr<MeetingPlace> make_meeting_place(int ranks) {
  return std::make_shared<MeetingPlace>(ranks);
}

namespace {

// Of each device; only the thread that is its rank comes here.
std::vector<QueuedCollective>& collectives_of(c10::Device device) {
  static std::array<std::vector<QueuedCollective>, queued_device::kDevices> of_devices;
  return of_devices[device.index()];
}

using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

class QueuedWork final : public c10d::Work {
 public:
  QueuedWork(c10::Device device, Clock end) : device_(device), end_(std::move(end)) {}

  bool isCompleted() override {
    return queued_device::detector().host_has_waited(device_.index(), end_);
  }
  bool wait(std::chrono::milliseconds) override {
    queued_device::block(current_stream(device_), end_);
    return true;
  }

 private:
  c10::Device device_;
  Clock end_;
};

class QueuedProcessGroup final : public c10d::ProcessGroup {
 public:
  QueuedProcessGroup(std::shared_ptr<MeetingPlace> place, int rank, int ranks, c10::Device device)
      : ProcessGroup(place->store(), rank, ranks),
        place_(std::move(place)),
        device_(device),
        stream_(c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_)) {
    deviceTypes_.insert(device_.type());
  }

  const std::string getBackendName() const override {
    return "queued";
  }

  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    begin("all-gather");
    gather(output, input);
    return end();
  }

  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    begin("all-gather");
    for (size_t i = 0; i < outputs.size(); ++i) {
      gather(outputs[i], inputs[i]);
    }
    return end();
  }

  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions&) override {
    begin("reduce-scatter");
    const auto inputs = place_->exchange(getRank(), read(input));
    std::vector<at::Tensor> mine;
    for (const auto& each : inputs) {
      mine.push_back(each.view({getSize(), -1})[getRank()]);
    }
    write(output).view({-1}).copy_(sum(mine));
    place_->meet();
    return end();
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM);
    begin("all-reduce");
    const at::Tensor total = sum(place_->exchange(getRank(), read(tensors[0])));
    place_->meet();
    write(tensors[0]).copy_(total);
    return end();
  }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    begin("broadcast");
    const bool sends = options.rootRank == getRank();
    const auto all = place_->exchange(getRank(), sends ? read(tensors[0]) : write(tensors[0]));
    if (!sends) {
      all[getRank()].copy_(all[options.rootRank]);
    }
    place_->meet();
    return end();
  }

  WorkPointer barrier(const c10d::BarrierOptions&) override {
    begin("barrier");
    place_->meet();
    return end();
  }

 private:
  void begin(const char* name) {
    queued_device::block(stream_, queued_device::record(current_stream(device_)));
    collectives_of(device_).push_back({name, queued_device::record(stream_), {}});
  }

  WorkPointer end() {
    collectives_of(device_).back().end = queued_device::record(stream_);
    return c10::make_intrusive<QueuedWork>(device_, queued_device::record(stream_));
  }

  at::Tensor read(const at::Tensor& tensor) {
    queued_device::use(tensor, /*writes=*/false, stream_, "collective");
    return queued_device::on_host(tensor);
  }

  at::Tensor write(const at::Tensor& tensor) {
    queued_device::use(tensor, /*writes=*/true, stream_, "collective");
    return queued_device::on_host(tensor);
  }

  void gather(const at::Tensor& output, const at::Tensor& input) {
    const auto inputs = place_->exchange(getRank(), read(input));
    auto rows = write(output).view({getSize(), -1}).unbind(0);
    for (int rank = 0; rank < getSize(); ++rank) {
      rows[rank].copy_(inputs[rank].view({-1}));
    }
    place_->meet();
  }

  static at::Tensor sum(const std::vector<at::Tensor>& tensors) {
    at::Tensor total = tensors[0].clone();
    for (size_t i = 1; i < tensors.size(); ++i) {
      total.add_(tensors[i]);
    }
    return total;
  }

  std::shared_ptr<MeetingPlace> place_;
  c10::Device device_;
  c10::Stream stream_;
};

} // namespace

std::vector<QueuedCollective> take_collectives(c10::Device device) {
  return std::exchange(collectives_of(device), {});
}

std::shared_ptr<Group> queued_group(
    const std::shared_ptr<MeetingPlace>& place, int rank, int ranks, c10::Device device) {
  const auto split = [=](const StorePtr& store, int rank_of_part, int ranks_of_part) -> ProcessGroupPtr {
    const auto part = place->part(*store, rank_of_part, ranks_of_part);
    return c10::make_intrusive<QueuedProcessGroup>(part, rank_of_part, ranks_of_part, device);
  };
  const auto process_group = c10::make_intrusive<QueuedProcessGroup>(place, rank, ranks, device);
  return c10d_group(process_group, {.timeout = std::chrono::seconds(30), .make_process_group = split});
}

} // namespace fsdp::testing
