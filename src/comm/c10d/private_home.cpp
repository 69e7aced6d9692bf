#include <utility>

#include <c10/core/GradMode.h>

#include "base/caller.h"
#include "base/stream.h"
#include "base/view_into.h"
#include "comm/c10d/over_channel.h"
#include "comm/payload.h"
#include "comm/queued.h"

namespace fsdp::adapter {
namespace {

// One flat all-gather and a copy-out, or one all-gather for each piece straight into its memory? See [Note: direct
// gathers].
constexpr int64_t kDirectSliceBytes = 1024 * 1024;
constexpr size_t kDirectPieces = 16;

char* address(const at::Tensor& memory) {
  return static_cast<char*>(memory.data_ptr());
}

// [Note: direct gathers] A collective of its own costs each piece a fixed time, a copy-out costs time by the byte.
// Gloo, 2 ranks on one host: 12 slices of 256 KiB take 6 ms flat and 14 ms direct, 12 of 1 MiB 25 and 20 ms, 4 of 4
// MiB 53 and 20 ms; so from 1 MiB on. A single piece needs no copy-out in any case. The bound on the pieces is for
// backends that cannot group them.
bool gathers_directly(const Payload& sent) {
  const auto count = sent.order.size();
  return count == 1 || (count <= kDirectPieces && sent.bytes >= kDirectSliceBytes * static_cast<int64_t>(count));
}

/// All slices of a home, on their way or here.
class PrivateGathered final : public Gathered {
 public:
  PrivateGathered(
      std::shared_ptr<Channel> channel, std::shared_ptr<const GatherPlan> plan, at::Tensor sent, const Label& label)
      : channel_(std::move(channel)),
        plan_(std::move(plan)),
        stream_(current_stream(plan_->device)),
        wholes_(channel_->pool().take(plan_->wholes.bytes, plan_->device)),
        sent_(std::move(sent)) {
    if (plan_->sent.bytes > 0) {
      pending_ = std::make_shared<Pending>(gathers_directly(plan_->sent) ? start_direct(label) : start_flat(label));
    }
  }

  // Memory of the gather stream is reused on the gather stream, which from here on waits for what the current stream
  // has queued so far: the last readers of the pieces. No later gather can overwrite what they read.
  ~PrivateGathered() override {
    order_release([this] { wait_stream(stream_, current_stream(stream_.device())); });
    // The backend may still write to the memory of a gather that nobody waited for.
    if (ready_ && !abandoned_) {
      channel_->pool().give_back(std::move(wholes_));
    }
  }

  // Meanwhile another thread may take memory from the pool.
  void abandon() override {
    abandoned_ = true;
  }

  void wait() override {
    if (ready_) {
      return;
    }
    const Stream reader = current_stream(plan_->device);
    if (pending_) {
      const StreamGuard on_gather_stream(stream_);
      pending_->finish();
      copy_out();
    }
    wait_stream(reader, stream_);
    ready_ = true;
  }

  void* piece(size_t index) const override {
    return address(wholes_) + plan_->wholes.offsets[index];
  }

  int64_t bytes() const override {
    return plan_->wholes.bytes + (flat_.defined() ? plan_->sent.bytes * plan_->size : 0);
  }

  const std::shared_ptr<Pending>& pending() const {
    return pending_;
  }

 private:
  Pending start_direct(const Label& label) {
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> inputs;
    for (const size_t i : plan_->sent.order) {
      const int64_t bytes = plan_->sent.slots[i].bytes;
      outputs.push_back(wholes_.narrow(0, plan_->wholes.offsets[i], bytes * plan_->size));
      inputs.push_back(sent_.narrow(0, plan_->sent.slots[i].offset, bytes));
    }
    return start(label, [&](Collectives& c) { return c.all_gather_each(outputs, inputs); });
  }

  Pending start_flat(const Label& label) {
    flat_ = channel_->pool().take(plan_->sent.bytes * plan_->size, plan_->device);
    const int64_t bytes = plan_->sent.bytes;
    const at::Tensor output = view_into(flat_, at::kByte, bytes * plan_->size);
    const at::Tensor input = view_into(sent_, at::kByte, bytes);
    return start(label, [&](Collectives& c) { return c.all_gather(output, input); });
  }

  Pending start(const Label& label, const Channel::Start& call) {
    return channel_->start(label, "all-gather", plan_->device, plan_->sent.bytes, call);
  }

  void copy_out() {
    sent_.reset();
    if (flat_.defined()) {
      plan_->copy_out(flat_, wholes_);
      channel_->pool().give_back(std::exchange(flat_, at::Tensor()));
    }
  }

  std::shared_ptr<Channel> channel_;
  std::shared_ptr<const GatherPlan> plan_;
  Stream stream_; // the stream that was current at the gather: all work on the memory below is queued there
  at::Tensor wholes_;
  at::Tensor sent_; // kept until the collective has read it
  at::Tensor flat_; // every rank's payload, until it is copied out
  std::shared_ptr<Pending> pending_;
  bool ready_ = false;
  bool abandoned_ = false;
};

class PrivateHome final : public Home {
 public:
  PrivateHome(std::shared_ptr<Channel> channel, std::vector<Piece> pieces, const HomeOptions& options)
      : channel_(std::move(channel)),
        plan_(std::make_shared<GatherPlan>(std::move(pieces), channel_->size(), options.device)),
        idle_buffers_(channel_->pool().keep_idle()),
        memory_(slice_memory(plan_->stored.bytes, at::kByte, options).zero_()) {}

  void* slice(size_t index) const override {
    return address(memory_) + plan_->stored.slots[index].offset;
  }

  // Other ranks never read this memory; a collective or a copy of this rank that was started and not waited for may.
  void begin_write(const Label&) override {
    if (const auto reading = reading_.lock()) {
      const WithoutCallersLock no_callers_lock;
      reading->block_current_stream();
    }
    if (memory_.device() != plan_->device) {
      const WithoutCallersLock no_callers_lock;
      copied_.synchronize();
    }
  }

  std::unique_ptr<Gathered> gather(const Label& label) override {
    const c10::NoGradGuard no_grad;
    auto gathered = std::make_unique<PrivateGathered>(channel_, plan_, sendable(), label);
    reading_ = gathered->pending();
    return gathered;
  }

 private:
  at::Tensor sendable() {
    at::Tensor sent = memory_;
    if (memory_.device() != plan_->device) {
      sent = memory_.to(plan_->device, /*non_blocking=*/true);
      copied_.record(current_stream(plan_->device));
    }
    return plan_->casts ? plan_->cast(sent) : sent;
  }

  std::shared_ptr<Channel> channel_;
  std::shared_ptr<const GatherPlan> plan_; // a Gathered may outlive its home
  std::shared_ptr<BufferPool::Idle> idle_buffers_; // kept from one gather or reduction to the next, as long as a home
  at::Tensor memory_;
  std::weak_ptr<Pending> reading_; // the collective that may still read `memory_`
  Event copied_; // the copy from host memory to the device, which the next write has to wait for
};

} // namespace

std::shared_ptr<Home> make_private_home(
    std::shared_ptr<Channel> channel, std::vector<Piece> pieces, const HomeOptions& options) {
  return std::make_shared<PrivateHome>(std::move(channel), std::move(pieces), options);
}

} // namespace fsdp::adapter
