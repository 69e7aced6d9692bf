#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <fsdp/checkpoint.h>

#include "base/check.h"
#include "engine/checkpoint_scope.h"
#include "engine/no_autocast_cache.h"

namespace fsdp {
namespace {

using Tensors = std::vector<at::Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

// The CPU, and the devices on which inputs lie.
std::vector<c10::Device> devices_of(const Tensors& inputs) {
  std::vector<c10::Device> devices{at::kCPU};
  for (const at::Tensor& input : inputs) {
    if (input.defined() && !input.is_meta() &&
        std::find(devices.begin(), devices.end(), input.device()) == devices.end()) {
      devices.push_back(input.device());
    }
  }
  return devices;
}

// The state of the random number generators of some devices.
class RandomState {
 public:
  explicit RandomState(std::vector<c10::Device> devices) : devices_(std::move(devices)) {
    for (const c10::Device& device : devices_) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      std::lock_guard<std::mutex> lock(generator.mutex());
      states_.push_back(generator.get_state());
    }
  }

  void restore() const {
    for (size_t i = 0; i < devices_.size(); ++i) {
      at::Generator generator = at::globalContext().defaultGenerator(devices_[i]);
      std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(states_[i]);
    }
  }

  const std::vector<c10::Device>& devices() const {
    return devices_;
  }

  bool operator==(const RandomState& other) const {
    return std::equal(
        states_.begin(), states_.end(), other.states_.begin(), other.states_.end(), [](const auto& a, const auto& b) {
          return at::equal(a, b);
        });
  }

 private:
  std::vector<c10::Device> devices_;
  Tensors states_;
};

// While it lives, the generators are where they were when `then` was taken. Nothing happens without it.
class RandomReplay {
 public:
  explicit RandomReplay(const std::optional<RandomState>& then) {
    if (then) {
      now_.emplace(then->devices());
      then->restore();
    }
  }
  RandomReplay(const RandomReplay&) = delete;
  RandomReplay& operator=(const RandomReplay&) = delete;
  ~RandomReplay() {
    if (now_) {
      now_->restore();
    }
  }

 private:
  std::optional<RandomState> now_;
};

// Whether and how autocast is on, for some kinds of devices.
class AutocastState {
 public:
  explicit AutocastState(const std::vector<c10::Device>& devices) : cached_(at::autocast::is_autocast_cache_enabled()) {
    for (const c10::Device& device : devices) {
      if (at::autocast::is_autocast_available(device.type())) {
        kinds_.push_back(
            {device.type(),
             at::autocast::is_autocast_enabled(device.type()),
             at::autocast::get_autocast_dtype(device.type())});
      }
    }
  }

  void restore() const {
    at::autocast::set_autocast_cache_enabled(cached_);
    for (const Kind& kind : kinds_) {
      at::autocast::set_autocast_enabled(kind.type, kind.enabled);
      at::autocast::set_autocast_dtype(kind.type, kind.dtype);
    }
  }

  bool enabled() const {
    return std::any_of(kinds_.begin(), kinds_.end(), [](const Kind& kind) { return kind.enabled; });
  }

 private:
  struct Kind {
    c10::DeviceType type;
    bool enabled;
    c10::ScalarType dtype;
  };

  bool cached_;
  std::vector<Kind> kinds_;
};

// While it lives, autocast is as it was when `then` was taken. Its cache of cast weights must not outlive the graph
// that the casts belong to, so it is emptied on the way in and on the way out.
class AutocastReplay {
 public:
  AutocastReplay(const AutocastState& then, const std::vector<c10::Device>& devices)
      : now_(devices), clears_(then.enabled()) {
    clear();
    then.restore();
  }
  AutocastReplay(const AutocastReplay&) = delete;
  AutocastReplay& operator=(const AutocastReplay&) = delete;
  ~AutocastReplay() {
    clear();
    now_.restore();
  }

 private:
  void clear() const {
    if (clears_) {
      at::autocast::clear_cache();
    }
  }

  AutocastState now_;
  bool clears_;
};

// What it takes to run the function again.
class Recipe {
 public:
  Recipe(Function function, const std::vector<c10::Device>& devices)
      : function_(std::move(function)), devices_(devices), autocast_(devices), random_(devices) {}

  Tensors first_run(const Tensors& inputs) {
    Tensors outputs = run_without_graph(inputs);
    // Most functions draw no random numbers: then there is nothing to keep, and the generators can be left alone later.
    if (RandomState(devices_) == *random_) {
      random_.reset();
    }
    return outputs;
  }

  // Runs again on `inputs` and gives them, and the parameters, their gradients.
  void run_backward(const Tensors& inputs, const Tensors& gradients) {
    AutocastReplay autocast(autocast_, devices_);
    const Tensors outputs = run_again(inputs);
    check_count(outputs, gradients);
    Tensors roots;
    Tensors seeds;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (gradients[i].defined() && outputs[i].defined() && outputs[i].requires_grad()) {
        roots.push_back(outputs[i]);
        seeds.push_back(gradients[i]);
      }
    }
    if (!roots.empty()) {
      torch::autograd::backward(roots, seeds);
    }
  }

 private:
  Tensors run_without_graph(const Tensors& inputs) {
    at::NoGradGuard no_grad;
    engine::NoAutocastCache no_cache;
    engine::CheckpointForward scope;
    return function_(inputs);
  }

  Tensors run_again(const Tensors& inputs) {
    at::AutoGradMode enable_grad(true);
    RandomReplay random(random_);
    return function_(inputs);
  }

  static void check_count(const Tensors& outputs, const Tensors& gradients) {
    FSDP_CHECK(
        outputs.size() == gradients.size(),
        "[checkpoint] expected the recomputation to return {} tensors, as the first run did, got {}. The function must "
        "do the same both times.",
        gradients.size(),
        outputs.size());
  }

  Function function_;
  std::vector<c10::Device> devices_;
  AutocastState autocast_;
  std::optional<RandomState> random_;
};

// Shares memory with the input, not its history.
at::Tensor leaf_like(const at::Tensor& input) {
  return input.defined() ? input.detach().set_requires_grad(input.requires_grad()) : input;
}

using SavedInputs = std::vector<torch::autograd::SavedVariable>;

// Saved before the function runs: one that writes to its inputs could not be run again, and is an error in backward.
SavedInputs save(const Tensors& inputs) {
  SavedInputs saved;
  saved.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    saved.emplace_back(input, /*is_output=*/false);
  }
  return saved;
}

// The function in the graph: an edge for each input. What else it reads gets its gradients from the backward nested
// inside.
class CheckpointNode : public torch::autograd::Node {
 public:
  CheckpointNode(Recipe recipe, const Tensors& inputs, SavedInputs saved)
      : Node(torch::autograd::collect_next_edges(inputs)), inputs_(std::move(saved)), recipe_(std::move(recipe)) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    engine::CheckpointBackward scope;
    check_allowed();
    Tensors inputs = unpack();
    recipe_->run_backward(inputs, gradients);
    torch::autograd::variable_list results;
    for (const at::Tensor& input : inputs) {
      results.push_back(input.defined() && input.requires_grad() ? input.grad() : at::Tensor());
    }
    return results;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& input : inputs_) {
      input.reset_data();
    }
    recipe_.reset();
  }

  std::string name() const override {
    return "CheckpointBackward";
  }

 private:
  static void check_allowed() {
    FSDP_CHECK(
        torch::autograd::Engine::get_default_engine().is_checkpoint_valid(),
        "[checkpoint] expected backward() without an inputs argument, got one that asks for the gradients of some "
        "tensors only (autograd::grad, or backward with inputs). Call backward() and read the .grad of the tensors.");
    FSDP_CHECK(
        !at::GradMode::is_enabled(),
        "[checkpoint] expected a backward whose own graph is not kept, got create_graph = true. Call the function "
        "without checkpoint to differentiate twice.");
  }

  Tensors unpack() {
    std::lock_guard<std::mutex> lock(mutex_);
    FSDP_CHECK(
        recipe_.has_value(),
        "[checkpoint] expected one backward, got a second one through the same graph. Set retain_graph = true in the "
        "first.");
    Tensors inputs;
    for (const auto& input : inputs_) {
      inputs.push_back(leaf_like(input.unpack()));
    }
    return inputs;
  }

  SavedInputs inputs_;
  std::optional<Recipe> recipe_;
};

// LibTorch has held nodes by std::shared_ptr, and by intrusive_ptr since.
using NodePointer = decltype(torch::autograd::Edge::function);

template <typename Pointer>
Pointer make_node(Recipe recipe, const Tensors& inputs, SavedInputs saved) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<CheckpointNode>(std::move(recipe), inputs, std::move(saved));
  } else {
    return Pointer(c10::make_intrusive<CheckpointNode>(std::move(recipe), inputs, std::move(saved)));
  }
}

// An output may be an input, a parameter or a view of one: each gets an alias of its own to carry the history.
at::Tensor with_history(const at::Tensor& output, const NodePointer& node) {
  if (!output.defined() || !torch::autograd::isDifferentiableType(output.scalar_type())) {
    torch::autograd::set_history(at::Tensor(), node);
    return output;
  }
  at::Tensor alias = output.detach();
  torch::autograd::set_history(alias, node);
  return alias;
}

} // namespace

std::vector<at::Tensor> checkpoint_list(Function function, const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) {
    return function(inputs);
  }
  Recipe recipe(std::move(function), devices_of(inputs));
  SavedInputs saved = save(inputs);
  Tensors outputs = recipe.first_run(inputs);
  const NodePointer node = make_node<NodePointer>(std::move(recipe), inputs, std::move(saved));
  for (at::Tensor& output : outputs) {
    output = with_history(output, node);
  }
  return outputs;
}

} // namespace fsdp
