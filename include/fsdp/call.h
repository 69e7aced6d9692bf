#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>
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

  /// Tensors within optionals, vectors, pairs and tuples too; anything else passes as it is.
  template <typename Value>
  auto inputs(Value&& value) const {
    return map(std::forward<Value>(value), [this](const at::Tensor& tensor) { return input(tensor); });
  }
  template <typename Value>
  auto outputs(Value&& value) const {
    return map(std::forward<Value>(value), [this](const at::Tensor& tensor) { return output(tensor); });
  }

 private:
  template <typename Value, typename Convert>
  static auto map(const Value& value, const Convert& convert) {
    if constexpr (std::is_same_v<Value, at::Tensor>) {
      return convert(value);
    } else {
      return map_container(value, convert);
    }
  }
  template <typename Item, typename Convert>
  static std::vector<Item> map_container(const std::vector<Item>& items, const Convert& convert) {
    std::vector<Item> result;
    for (const auto& item : items) {
      result.push_back(map(item, convert));
    }
    return result;
  }
  template <typename Item, typename Convert>
  static std::optional<Item> map_container(const std::optional<Item>& item, const Convert& convert) {
    return item ? std::optional<Item>(map(*item, convert)) : std::nullopt;
  }
  template <typename First, typename Second, typename Convert>
  static std::pair<First, Second> map_container(const std::pair<First, Second>& pair, const Convert& convert) {
    return {map(pair.first, convert), map(pair.second, convert)};
  }
  template <typename... Items, typename Convert>
  static std::tuple<Items...> map_container(const std::tuple<Items...>& items, const Convert& convert) {
    return std::apply([&](const auto&... item) { return std::tuple<Items...>(map(item, convert)...); }, items);
  }
  template <typename Value, typename Convert>
  static Value map_container(const Value& value, const Convert&) {
    return value;
  }

  std::optional<c10::Device> device_;
  std::optional<c10::ScalarType> input_dtype_;
  std::optional<c10::ScalarType> output_dtype_;
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
} // namespace detail

/// `module->forward(arguments...)` through the module's boundary.
template <typename Held, typename... Arguments>
auto call(Held& module, Arguments&&... arguments) {
  Boundary boundary(module);
  return boundary.outputs(detail::module_of(module).forward(boundary.inputs(std::forward<Arguments>(arguments))...));
}

/// Lets calls of a method by this name through `call_method` have the module's boundary. For parameters no method needs
/// it.
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
