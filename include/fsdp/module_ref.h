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
}

/// A module in any form in which programs have one: the module itself, a holder (`nn::Linear`), a `std::shared_ptr`.
/// Made implicitly, for the time of a call: it does not keep the module alive.
template <typename Module>
class BasicModuleRef {
 public:
  BasicModuleRef(Module& module) : module_(&module) {}
  template <typename Contained>
  requires std::is_convertible_v<Contained*, Module*> BasicModuleRef(const torch::nn::ModuleHolder<Contained>& holder)
      : module_(holder.is_empty() ? nullptr : holder.ptr().get()) {}
  template <typename Pointed>
  requires std::is_convertible_v<Pointed*, Module*> BasicModuleRef(const std::shared_ptr<Pointed>& module)
      : module_(module.get()) {}

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
