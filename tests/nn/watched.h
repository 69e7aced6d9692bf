#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/parity.h"

/// Models whose steps are watched: what the engine does, event by event.
namespace fsdp::testing {

inline std::string text_of(const engine::Event& event) {
  static const std::map<engine::EventKind, std::string> words{
      {engine::EventKind::kUnshard, "+"},
      {engine::EventKind::kWait, "="},
      {engine::EventKind::kReshard, "-"},
      {engine::EventKind::kReduce, "R"},
      {engine::EventKind::kReduced, "r"},
      {engine::EventKind::kEndBackward, "end"}};
  return words.at(event.kind) + (event.unit == nullptr ? "" : event.unit->empty() ? "root" : *event.unit);
}

/// Three layers and a root with a parameter of its own at the beginning and the end.
struct StackImpl : torch::nn::Module {
  explicit StackImpl(int64_t width = 4) {
    scale = register_parameter("scale", torch::ones({width}));
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(width, width)));
    }
  }
  at::Tensor forward(at::Tensor x, bool checkpointed = false) {
    x = x * scale;
    for (auto& layer : layers) {
      x = checkpointed ? checkpoint([layer](const at::Tensor& in) mutable { return torch::tanh(layer(in)); }, x)
                       : torch::tanh(layer(x));
    }
    return (x * scale).sum();
  }
  at::Tensor scale;
  std::vector<torch::nn::Linear> layers;
};

/// A sharded model whose events are noted.
class Watched {
 public:
  explicit Watched(torch::nn::Module& module) : root_(fully_shard(module)) {
    root_.unit()->runtime().set_observer([this](const engine::Event& event) {
      events_.push_back(event);
      line_ += (line_.empty() ? "" : " ") + text_of(event);
    });
  }
  /// What happened in it, in one line.
  std::string step(const std::function<void()>& run) {
    line_.clear();
    events_.clear();
    run();
    return line_;
  }
  /// The third of three equal ones: it must be like the second.
  std::string learned(const std::function<void()>& run) {
    step(run);
    const auto second = step(run);
    EXPECT_EQ(step(run), second);
    return second;
  }
  FSDPModule& root() {
    return root_;
  }
  const std::vector<engine::Event>& events() const {
    return events_;
  }

 private:
  FSDPModule root_;
  std::vector<engine::Event> events_;
  std::string line_;
};

struct Stack {
  explicit Stack(FullyShardOptions options = {}, int64_t width = 4) : module(std::make_shared<StackImpl>(width)) {
    for (auto& layer : module->layers) {
      fully_shard(*layer, options);
    }
    watched.emplace(*module);
  }
  std::string step(const std::function<void()>& run) {
    return watched->step(run);
  }
  std::string learned(const std::function<void()>& run) {
    return watched->learned(run);
  }
  std::shared_ptr<StackImpl> module;
  std::optional<Watched> watched;
};

} // namespace fsdp::testing
