#pragma once

#include <concepts>
#include <memory>
#include <optional>
#include <type_traits>

#include <c10/core/InferenceMode.h>

#include <fsdp/export.h>
#include <fsdp/module_ref.h>

namespace fsdp {

/// A copy of a sharded model, sharded the same way, with its own shards (for an exponential moving average, a target
/// network). The module and its children must be `torch::nn::Cloneable`, as for `Module::clone`. Collective.
FSDP_API std::shared_ptr<torch::nn::Module> clone(ModuleRef module);

template <typename ModuleType>
std::shared_ptr<ModuleType> clone(const std::shared_ptr<ModuleType>& module) {
  return std::dynamic_pointer_cast<ModuleType>(clone(ModuleRef(module)));
}

template <detail::HoldsModule Holder>
Holder clone(const Holder& module) {
  return std::dynamic_pointer_cast<typename Holder::ContainedType>(clone(ModuleRef(module)));
}

/// `copy`, which was built like the sharded `module` and is not sharded, becomes a copy of it. Collective.
FSDP_API void clone_into(ModuleRef module, ModuleRef copy);

/// A copy of a sharded model that need not be `Cloneable`: of what `build` returns, a holder or a `std::shared_ptr`
/// (`[&] { return Net(config); }`). Collective.
template <std::invocable Build>
auto clone(ModuleRef module, Build&& build) {
  std::optional<c10::InferenceMode> no_inference;
  if (c10::InferenceMode::is_enabled()) {
    no_inference.emplace(false); // the copy may be trained
  }
  auto copy = build();
  static_assert(
      !std::is_base_of_v<torch::nn::Module, decltype(copy)>,
      "expected a function that returns a module's holder or a std::shared_ptr, got one that returns the module");
  clone_into(module, copy);
  return copy;
}

/// average = decay * average + (1 - decay) * model, shard by shard, without communication. Buffers are copied.
FSDP_API void ema_update_(ModuleRef average, ConstModuleRef model, double decay);

} // namespace fsdp
