#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>
#include <fsdp/module_ref.h>

namespace fsdp {

struct FSDPOptions;

/// Which modules of a model become units: functions of PyTorch's names that do what they do there. Nothing is replaced:
/// a policy chooses, `modules_to_wrap` lists what it has chosen.

/// Changes the options of one unit, which are otherwise those given for the whole.
using WrapOverride = std::function<void(FSDPOptions& options)>;

/// Asked twice for each module: on the way down whether to go on (`recurse`), and, if so, on the way back, when units
/// below have been chosen, whether it is one. `nonwrapped_numel`: elements of its parameters that are in no unit yet.
using WrapPolicyFn = std::function<bool(torch::nn::Module& module, bool recurse, int64_t nonwrapped_numel)>;

/// A set of classes of modules, derived classes included: `ModuleClasses::of<BlockImpl, torch::nn::Linear>()`, by class
/// or by holder.
class FSDP_API ModuleClasses {
 public:
  ModuleClasses() = default;

  template <typename... Classes>
  static ModuleClasses of() {
    ModuleClasses classes;
    (classes.tests_.push_back(&is_one<Classes>), ...);
    return classes;
  }

  /// Is the module of one of these classes?
  bool contain(const torch::nn::Module& module) const;

 private:
  template <typename Class>
  static bool is_one(const torch::nn::Module& module) {
    if constexpr (detail::HoldsModule<Class>) {
      return dynamic_cast<const typename Class::ContainedType*>(&module) != nullptr;
    } else {
      return dynamic_cast<const Class*>(&module) != nullptr;
    }
  }

  std::vector<bool (*)(const torch::nn::Module&)> tests_;
};

/// Every module.
FSDP_API bool always_wrap_policy(torch::nn::Module& module, bool recurse, int64_t nonwrapped_numel);

struct FSDP_API SizeBasedOptions {
  int64_t min_num_params = 100'000'000; ///< elements of parameters that are in no unit yet
  ModuleClasses force_leaf_modules = default_force_leaf_modules(); ///< neither they nor what is below them
  ModuleClasses exclude_wrap_modules = default_exclude_wrap_modules(); ///< no units, but perhaps their children

  static ModuleClasses default_force_leaf_modules(); ///< MultiheadAttention
  static ModuleClasses default_exclude_wrap_modules(); ///< ModuleList, ModuleDict
};

/// Modules with at least so many elements that are in no unit yet.
FSDP_API WrapPolicyFn size_based_auto_wrap_policy(SizeBasedOptions options = {});

/// Modules of these classes.
FSDP_API WrapPolicyFn transformer_auto_wrap_policy(ModuleClasses transformer_layer_cls);

/// Modules for which the function says true.
FSDP_API WrapPolicyFn lambda_auto_wrap_policy(std::function<bool(torch::nn::Module& module)> lambda_fn);

/// What at least one of the policies wants.
FSDP_API WrapPolicyFn or_policy(std::vector<WrapPolicyFn> policies);

/// Modules of these classes: `ModuleWrapPolicy::of<BlockImpl, Head>()`. Also a `WrapPolicyFn`.
class FSDP_API ModuleWrapPolicy {
 public:
  explicit ModuleWrapPolicy(ModuleClasses module_classes) : classes_(std::move(module_classes)) {}

  template <typename... Classes>
  static ModuleWrapPolicy of() {
    return ModuleWrapPolicy(ModuleClasses::of<Classes...>());
  }

  bool operator()(torch::nn::Module& module, bool recurse, int64_t nonwrapped_numel) const;

 private:
  ModuleClasses classes_;
};

/// What a `CustomPolicy` says of a module: whether it is a unit, or how its options differ, which makes it one.
class FSDP_API WrapChoice {
 public:
  WrapChoice(std::same_as<bool> auto wrap) : wrap_(wrap) {}
  /// An empty function chooses nothing.
  template <typename Override>
  requires std::constructible_from<WrapOverride, Override> WrapChoice(Override change) : change_(std::move(change)) {
    wrap_ = change_ != nullptr;
  }

  bool wrap() const {
    return wrap_;
  }
  const WrapOverride& change() const {
    return change_;
  }

 private:
  bool wrap_ = false;
  WrapOverride change_;
};

/// A function that is asked once for each module, the outermost included, parents first. Give a lambda the result type:
/// `CustomPolicy([](torch::nn::Module& module) -> fsdp::WrapChoice { ... })`.
class FSDP_API CustomPolicy {
 public:
  explicit CustomPolicy(std::function<WrapChoice(torch::nn::Module& module)> lambda_fn);

  WrapChoice operator()(torch::nn::Module& module) const {
    return function_(module);
  }

 private:
  std::function<WrapChoice(torch::nn::Module&)> function_;
};

/// Any of these.
class FSDP_API AutoWrapPolicy {
 public:
  AutoWrapPolicy(ModuleWrapPolicy policy);
  AutoWrapPolicy(CustomPolicy policy) : form_(std::move(policy)) {}
  template <typename Function>
  requires std::constructible_from<WrapPolicyFn, Function> AutoWrapPolicy(Function function)
      : AutoWrapPolicy(FromFunction(), WrapPolicyFn(std::move(function))) {}

  /// This policy, and that modules of these classes are units in any case, with other options.
  AutoWrapPolicy and_individually(ModuleClasses classes, WrapOverride change = nullptr) const;

 private:
  friend class ModulesToWrap;
  struct FromFunction {};
  struct Individually {
    ModuleClasses classes;
    WrapOverride change;
  };
  AutoWrapPolicy(FromFunction, WrapPolicyFn function);

  std::variant<WrapPolicyFn, CustomPolicy> form_;
  std::vector<Individually> individually_;
};

/// What is no unit, with all that is below it, and does not count.
struct IgnoredStates {
  std::vector<ModuleRef> modules = {};
  std::vector<at::Tensor> params = {};
};

struct ModuleToWrap {
  std::string path; ///< "blocks.3"
  torch::nn::Module* module = nullptr;
  WrapOverride change; ///< null: the options given for the whole
  int64_t numel = 0; ///< elements of the parameters that its unit gets; 0: it has none of its own
};

/// The modules below `root` that the policy chooses, children before their parents: in this order each takes what those
/// before it have left. `root` itself is not listed, it is a unit in any case. A module that is registered in several
/// places is listed once, a parameter counts once. It is an error if there are units already.
FSDP_API std::vector<ModuleToWrap> modules_to_wrap(
    ModuleRef root, const AutoWrapPolicy& policy, const IgnoredStates& ignored = {});

} // namespace fsdp
