#include "engine/checkpoint_scope.h"

#include <atomic>

#include <torch/csrc/autograd/engine.h>

#include "base/caller.h"
#include "engine/runtime.h"

namespace fsdp::engine {

namespace {

std::atomic<int64_t> next_segment{0};
thread_local int64_t current_segment = -1;
// Whom to tell when the outermost backward around the checkpoints of this thread ends; null outside of them.
thread_local std::shared_ptr<std::vector<std::weak_ptr<Runtime>>> waiting;

} // namespace

CheckpointForward::CheckpointForward() : outer_(std::exchange(current_segment, next_segment++)) {}

CheckpointForward::~CheckpointForward() {
  current_segment = outer_;
}

int64_t CheckpointForward::current() {
  return current_segment;
}

CheckpointBackward::CheckpointBackward() : outer_(waiting) {
  if (!waiting) {
    waiting = std::make_shared<Runtimes>();
    torch::autograd::Engine::get_default_engine().queue_callback([runtimes = waiting] {
      for (const auto& weak : *runtimes) {
        if (auto runtime = weak.lock()) {
          called_by_torch([&] { runtime->end_backward(); });
        }
      }
    });
  }
}

CheckpointBackward::~CheckpointBackward() {
  waiting = std::move(outer_);
}

bool CheckpointBackward::active() {
  return waiting != nullptr;
}

void CheckpointBackward::end_with_outer_backward(const std::shared_ptr<Runtime>& runtime) {
  waiting->push_back(runtime);
}

} // namespace fsdp::engine
