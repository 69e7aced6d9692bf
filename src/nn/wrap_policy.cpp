#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <fsdp/wrap.h>

#include "base/check.h"
#include "nn/registry.h"
#include "nn/slots.h"

namespace fsdp {

namespace {

using torch::nn::Module;

void check_given(bool given, const char* policy) {
  FSDP_CHECK(given, "[{}] the function is empty: give one that says which modules are units", policy);
}

} // namespace

bool ModuleClasses::contain(const Module& module) const {
  return std::any_of(tests_.begin(), tests_.end(), [&](const auto& is_one) { return is_one(module); });
}

bool always_wrap_policy(Module&, bool, int64_t) {
  return true;
}

ModuleClasses SizeBasedOptions::default_force_leaf_modules() {
  return ModuleClasses::of<torch::nn::MultiheadAttention>();
}

ModuleClasses SizeBasedOptions::default_exclude_wrap_modules() {
  return ModuleClasses::of<torch::nn::ModuleList, torch::nn::ModuleDict>();
}

WrapPolicyFn size_based_auto_wrap_policy(SizeBasedOptions options) {
  return [options = std::move(options)](Module& module, bool recurse, int64_t nonwrapped_numel) {
    const auto& stops = recurse ? options.force_leaf_modules : options.exclude_wrap_modules;
    return nonwrapped_numel >= options.min_num_params && !stops.contain(module);
  };
}

WrapPolicyFn transformer_auto_wrap_policy(ModuleClasses transformer_layer_cls) {
  return ModuleWrapPolicy(std::move(transformer_layer_cls));
}

WrapPolicyFn lambda_auto_wrap_policy(std::function<bool(Module&)> lambda_fn) {
  check_given(lambda_fn != nullptr, "lambda_auto_wrap_policy");
  return [lambda_fn = std::move(lambda_fn)](Module& module, bool recurse, int64_t) {
    return recurse || lambda_fn(module);
  };
}

WrapPolicyFn or_policy(std::vector<WrapPolicyFn> policies) {
  for (const auto& policy : policies) {
    check_given(policy != nullptr, "or_policy");
  }
  return [policies = std::move(policies)](Module& module, bool recurse, int64_t nonwrapped_numel) {
    return std::any_of(
        policies.begin(), policies.end(), [&](const auto& wants) { return wants(module, recurse, nonwrapped_numel); });
  };
}

bool ModuleWrapPolicy::operator()(Module& module, bool recurse, int64_t) const {
  return recurse || classes_.contain(module);
}

CustomPolicy::CustomPolicy(std::function<WrapChoice(Module&)> lambda_fn) : function_(std::move(lambda_fn)) {
  check_given(function_ != nullptr, "CustomPolicy");
}

AutoWrapPolicy::AutoWrapPolicy(ModuleWrapPolicy policy)
    : form_(CustomPolicy([policy = std::move(policy)](Module& module) -> WrapChoice {
        return policy(module, /*recurse=*/false, /*nonwrapped_numel=*/0);
      })) {}

AutoWrapPolicy::AutoWrapPolicy(FromFunction, WrapPolicyFn function) : form_(std::move(function)) {
  check_given(std::get<WrapPolicyFn>(form_) != nullptr, "auto_wrap_policy");
}

AutoWrapPolicy AutoWrapPolicy::and_individually(ModuleClasses classes, WrapOverride change) const {
  AutoWrapPolicy both = *this;
  if (auto* function = std::get_if<WrapPolicyFn>(&both.form_)) {
    *function = or_policy({*function, ModuleWrapPolicy(classes)});
  }
  both.individually_.push_back({std::move(classes), std::move(change)});
  return both;
}

/// One walk over a model.
class ModulesToWrap {
 public:
  ModulesToWrap(Module& root, const AutoWrapPolicy& policy, const IgnoredStates& ignored)
      : policy_(policy), root_(root) {
    for (const auto& module : ignored.modules) {
      for (const auto& [path, each] : nn::modules_of(module.for_operation("auto_wrap_policy"))) {
        ignored_.insert(each);
        take_parameters(*each);
      }
    }
    for (const auto& param : ignored.params) {
      taken_.insert(param.unsafeGetTensorImpl());
    }
  }

  std::vector<ModuleToWrap> result() {
    if (const auto* custom = std::get_if<CustomPolicy>(&policy_.form_)) {
      ask_each(*custom);
    }
    visited_.insert(&root_);
    visit(root_, "");
    return std::move(result_);
  }

 private:
  // Parents first; what is chosen is listed on the walk.
  void ask_each(const CustomPolicy& custom) {
    for (const auto& [path, each] : nn::modules_of(root_)) {
      if (!ignored_.contains(each) && !choices_.contains(each)) {
        choices_.emplace(each, custom(*each));
      }
    }
  }

  void visit(Module& module, const std::string& path) {
    if (!recurses(module)) {
      return;
    }
    for (const auto& child : module.named_children()) {
      Module* each = child.value().get();
      if (each != nullptr && !ignored_.contains(each) && visited_.insert(each).second) {
        visit(*each, path.empty() ? child.key() : path + "." + child.key());
      }
    }
    if (&module == &root_) {
      return;
    }
    const int64_t numel = nonwrapped_numel(module);
    const WrapChoice choice = choice_of(module, numel);
    if (choice.wrap()) {
      result_.push_back({path, &module, choice.change(), numel});
      for (const auto& [name, each] : nn::modules_of(module)) {
        take_parameters(*each);
      }
    }
  }

  bool recurses(Module& module) const {
    const auto* function = std::get_if<WrapPolicyFn>(&policy_.form_);
    return function == nullptr || (*function)(module, /*recurse=*/true, nonwrapped_numel(module));
  }

  WrapChoice choice_of(Module& module, int64_t numel) const {
    const auto* function = std::get_if<WrapPolicyFn>(&policy_.form_);
    const WrapChoice choice =
        function != nullptr ? (*function)(module, /*recurse=*/false, numel) : choices_.at(&module);
    bool wrap = choice.wrap();
    std::vector<WrapOverride> changes{choice.change()};
    for (const auto& [classes, change] : policy_.individually_) {
      if (classes.contain(module)) {
        wrap = true;
        changes.push_back(change);
      }
    }
    std::erase(changes, nullptr);
    if (!wrap || changes.empty()) {
      return wrap;
    }
    return [changes](FSDPOptions& options) {
      for (const auto& change : changes) {
        change(options);
      }
    };
  }

  int64_t nonwrapped_numel(Module& module) const {
    int64_t numel = 0;
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const auto& [path, each] : nn::modules_of(module)) {
      for (const auto& item : nn::registered_parameters(*each)) {
        const auto* tensor = item.value().unsafeGetTensorImpl();
        const bool counts = item.value().defined() && !taken_.contains(tensor) && seen.insert(tensor).second;
        numel += counts ? item.value().numel() : 0;
      }
    }
    return numel;
  }

  void take_parameters(const Module& module) {
    for (const auto& item : nn::registered_parameters(module)) {
      taken_.insert(item.value().unsafeGetTensorImpl());
    }
  }

  const AutoWrapPolicy& policy_;
  Module& root_;
  std::unordered_set<const Module*> ignored_, visited_;
  std::unordered_set<const c10::TensorImpl*> taken_; // ignored, or in a unit
  std::unordered_map<const Module*, WrapChoice> choices_;
  std::vector<ModuleToWrap> result_;
};

std::vector<ModuleToWrap> modules_to_wrap(ModuleRef given, const AutoWrapPolicy& policy, const IgnoredStates& ignored) {
  Module& root = given.for_operation("auto_wrap_policy");
  for (const auto& [path, each] : nn::modules_of(root)) {
    FSDP_CHECK(
        nn::registry::find(*each) == nullptr,
        "[auto_wrap_policy] requires modules to not already have FSDP applied, but found {} in {}: leave the policy "
        "out, or let it choose this module too",
        path.empty() ? "it" : "'" + path + "'",
        root.name());
  }
  return ModulesToWrap(root, policy, ignored).result();
}

} // namespace fsdp
