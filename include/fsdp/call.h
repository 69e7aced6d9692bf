#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/checkpoint.h>
#include <fsdp/export.h>
#include <fsdp/map_tensors.h>
#include <fsdp/module_ref.h>

namespace fsdp {

/// What happens to tensors that enter and leave a module through `fsdp::call`: inputs move to the module's device and
/// are cast to its param_dtype (unless cast_forward_inputs is off), outputs are cast to its output_dtype. Nothing for a
/// module that is not sharded.
class FSDP_API Boundary {
 public:
  explicit Boundary(ConstModuleRef module);

  at::Tensor input(const at::Tensor& tensor) const;
  at::Tensor output(const at::Tensor& tensor) const;

  /// The call that begins is to run through a checkpoint: `apply_activation_checkpointing` has marked the module.
  bool begins_checkpoint() const;

  /// Tensors within optionals, vectors, pairs and tuples too; anything else passes as it is.
  template <typename Value>
  auto inputs(const Value& value) const {
    return detail::map_tensors(value, [this](const at::Tensor& tensor) { return input(tensor); });
  }
  template <typename Value>
  auto outputs(const Value& value) const {
    return detail::map_tensors(value, [this](const at::Tensor& tensor) { return output(tensor); });
  }

 private:
  std::optional<c10::Device> device_;
  std::optional<c10::ScalarType> input_dtype_;
  std::optional<c10::ScalarType> output_dtype_;
  const torch::nn::Module& module_;
};

namespace detail {
/// The module itself, which has the methods, of whatever holds it.
template <typename Held>
auto& module_of(Held& held) {
  if constexpr (std::is_base_of_v<torch::nn::Module, Held>) {
    return held;
  } else {
    return *held;
  }
}

[[noreturn]] FSDP_API void refuse_checkpoint(const char* module_type, const char* value_types);

/// `forward(arguments...)` of a module through a checkpoint, which keeps the module.
template <typename Forward, typename... Values>
auto checkpoint_forward(std::shared_ptr<const torch::nn::Module> module, Forward forward, const Values&... values) {
  using Result = std::decay_t<std::invoke_result_t<Forward&, Values...>>;
  const auto first = std::make_shared<std::optional<Result>>(); // what the first run returns
  const std::tuple<Values...> given(values...);
  auto run = [module, forward, first = std::weak_ptr(first), without = with_tensors(given, {})](
                 const std::vector<at::Tensor>& inputs) mutable {
    Result result = std::apply(forward, with_tensors(without, inputs));
    if (const auto kept = first.lock()) {
      *kept = result;
    }
    return tensors_in(result);
  };
  const auto outputs = checkpoint_list(std::move(run), tensors_in(given));
  return with_tensors(**first, outputs);
}

/// What lies within a module's boundary.
template <typename Module, typename Forward, typename... Values>
auto run_within(const Boundary& boundary, Module& module, Forward forward, Values... values) {
  using Result = std::decay_t<std::invoke_result_t<Forward&, Values...>>;
  if (boundary.begins_checkpoint()) {
    if constexpr (kHasKnownTensors<Result> && (kHasKnownTensors<Values> && ...)) {
      return checkpoint_forward(module.shared_from_this(), forward, values...);
    } else {
      refuse_checkpoint(typeid(module).name(), typeid(Result(Values...)).name());
    }
  }
  return Result(forward(std::move(values)...));
}
} // namespace detail

/// `module->forward(arguments...)` through the module's boundary.
template <typename Held, typename... Arguments>
auto call(Held& module, Arguments&&... arguments) {
  Boundary boundary(module);
  auto& itself = detail::module_of(module);
  const auto forward = [&itself](auto&&... values) {
    return itself.forward(std::forward<decltype(values)>(values)...);
  };
  return boundary.outputs(detail::run_within(boundary, itself, forward, boundary.inputs(arguments)...));
}

/// Lets calls of a method by this name through `call_method` have the module's boundary. For parameters no method needs
/// it. Does nothing for a module that is not sharded: call it after `fully_shard`.
FSDP_API void register_fsdp_forward_method(ModuleRef module, const std::string& method_name);
FSDP_API bool is_fsdp_forward_method(ConstModuleRef module, const std::string& method_name);

/// `(module.get()->*method)(arguments...)`, through the boundary if `method_name` is registered.
template <typename Held, typename Method, typename... Arguments>
auto call_method(Held& module, const std::string& method_name, Method method, Arguments&&... arguments) {
  const bool through_boundary = is_fsdp_forward_method(module, method_name);
  auto& itself = detail::module_of(module);
  if (!through_boundary) {
    return (itself.*method)(std::forward<Arguments>(arguments)...);
  }
  Boundary boundary(itself);
  return boundary.outputs((itself.*method)(boundary.inputs(std::forward<Arguments>(arguments))...));
}

} // namespace fsdp

/// As TORCH_MODULE(Name), but calls of the holder go through `fsdp::call`.
#define FSDP_MODULE(Name)                                              \
  class Name : public torch::nn::ModuleHolder<Name##Impl> {            \
   public:                                                             \
    using torch::nn::ModuleHolder<Name##Impl>::ModuleHolder;           \
    using Impl [[maybe_unused]] = Name##Impl;                          \
    template <typename... Arguments>                                   \
    auto operator()(Arguments&&... arguments) {                        \
      return fsdp::call(*this, std::forward<Arguments>(arguments)...); \
    }                                                                  \
  }
