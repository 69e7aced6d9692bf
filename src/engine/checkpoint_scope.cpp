#include "engine/checkpoint_scope.h"

#include <atomic>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/engine.h>

#include "engine/backward_graph.h"

namespace fsdp::engine {

/// The outermost backward around the checkpoints of a thread, and what is to be done at its end.
struct CheckpointBackward::Outermost {
  BackwardGraph graph = BackwardGraph::current();
  std::vector<std::function<void()>> at_end;

  static std::shared_ptr<Outermost>& of_thread() {
    static thread_local std::shared_ptr<Outermost> outermost;
    return outermost;
  }
};

namespace {

std::atomic<int64_t> next_segment{0};
thread_local int64_t current_segment = -1;

} // namespace

CheckpointForward::CheckpointForward() : outer_(std::exchange(current_segment, next_segment++)) {}

CheckpointForward::~CheckpointForward() {
  current_segment = outer_;
}

int64_t CheckpointForward::current() {
  return current_segment;
}

CheckpointBackward::CheckpointBackward() : around_(Outermost::of_thread()) {
  if (!around_) {
    const auto outermost = std::make_shared<Outermost>();
    torch::autograd::Engine::get_default_engine().queue_callback([outermost] {
      for (const auto& run : outermost->at_end) {
        run();
      }
    });
    Outermost::of_thread() = outermost;
  }
}

CheckpointBackward::~CheckpointBackward() {
  Outermost::of_thread() = std::move(around_);
}

bool CheckpointBackward::active() {
  return Outermost::of_thread() != nullptr;
}

BackwardGraph CheckpointBackward::outermost() {
  const auto& around = Outermost::of_thread();
  return around ? around->graph : BackwardGraph::current();
}

void CheckpointBackward::at_end(std::function<void()> run) {
  if (const auto& around = Outermost::of_thread()) {
    around->at_end.push_back(std::move(run));
  } else {
    torch::autograd::Engine::get_default_engine().queue_callback(std::move(run));
  }
}

} // namespace fsdp::engine
