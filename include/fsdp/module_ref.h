#pragma once

#include <memory>
#include <type_traits>

#include <fsdp/export.h>

namespace torch::nn {
class Module;
template <typename Contained>
class ModuleHolder;
} // namespace torch::nn

namespace fsdp {

namespace detail {
[[noreturn]] FSDP_API void refuse_empty_module(const char* operation);

template <typename From, typename To>
concept PointsTo = std::is_convertible_v<From*, To*>;

/// `nn::Linear`, or another class made by TORCH_MODULE.
template <typename Holder>
concept HoldsModule = std::is_base_of_v<torch::nn::ModuleHolder<typename Holder::ContainedType>, Holder>;
} // namespace detail

/// A module in any form in which programs have one: the module itself, a holder (`nn::Linear`), a pointer. Made
/// implicitly, for the time of a call: it does not keep the module alive.
template <typename Module>
class BasicModuleRef {
 public:
  BasicModuleRef(Module& module) : module_(&module) {}
  BasicModuleRef(Module* module) : module_(module) {}
  template <detail::PointsTo<Module> Contained>
  BasicModuleRef(const torch::nn::ModuleHolder<Contained>& holder)
      : module_(holder.is_empty() ? nullptr : holder.ptr().get()) {}
  template <detail::PointsTo<Module> Pointed>
  BasicModuleRef(const std::shared_ptr<Pointed>& module) : module_(module.get()) {}
  template <detail::PointsTo<Module> Pointed>
  BasicModuleRef(const std::unique_ptr<Pointed>& module) : module_(module.get()) {}

  /// The module; an Error of this operation's if there is none, in a holder or pointer that is empty.
  Module& for_operation(const char* operation) const {
    if (module_ == nullptr) {
      detail::refuse_empty_module(operation);
    }
    return *module_;
  }

 private:
  Module* module_;
};

using ModuleRef = BasicModuleRef<torch::nn::Module>;
using ConstModuleRef = BasicModuleRef<const torch::nn::Module>;

} // namespace fsdp
