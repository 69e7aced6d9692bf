// What can be done with a module that FullyShardedDataParallel has sharded.

#include "fsdp1/fsdp_instance.h"

#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <fsdp/front_end.h>
#include <fsdp/sharded_tensor.h>

#include "base/check.h"
#include "engine/runtime.h"
#include "fsdp1/comm_hooks.h"
#include "fsdp1/root_call.h"
#include "nn/registry.h"
#include "nn/slots.h"

namespace fsdp {

using engine::Unit;

namespace instances {

std::shared_ptr<FSDPInstance::Impl> find(const std::shared_ptr<Unit>& unit) {
  return std::dynamic_pointer_cast<FSDPInstance::Impl>(unit->companion);
}

std::vector<std::shared_ptr<FSDPInstance::Impl>> below(torch::nn::Module& module) {
  std::vector<std::shared_ptr<FSDPInstance::Impl>> found;
  for (const auto& [path, each] : nn::modules_of(module)) {
    const auto unit = nn::registry::find(*each);
    if (auto instance = unit ? find(unit) : nullptr) {
      found.push_back(std::move(instance));
    }
  }
  return found;
}

} // namespace instances

std::shared_ptr<Unit> FSDPInstance::Impl::unit(const char* operation) const {
  auto unit = weak_unit.lock();
  FSDP_CHECK(
      unit, "[{}] the model of this instance is gone: keep the model as long as what fsdp_modules gave", operation);
  return unit;
}

torch::nn::Module& FSDPInstance::Impl::module(const char* operation) const {
  const auto module = weak_module.lock(); // it is somebody's, who calls this
  FSDP_CHECK(
      module, "[{}] the module of this instance is gone: keep the model as long as what fsdp_modules gave", operation);
  return *module;
}

namespace {

using Impl = FSDPInstance::Impl;

std::shared_ptr<Unit> root_of(std::shared_ptr<Unit> unit) {
  while (unit->parent() != nullptr) {
    unit = unit->parent()->shared_from_this();
  }
  return unit;
}

void check_root(const Unit& unit, const char* operation) {
  FSDP_CHECK(
      unit.parent() == nullptr,
      "[{}] should only be called on the root FSDP instance, but '{}' lies below '{}': call it on the outermost one",
      operation,
      unit.display_name(),
      unit.parent()->display_name());
}

bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::kHybridShard || strategy == ShardingStrategy::kHybridShardZero2;
}

bool is_called(const std::shared_ptr<Unit>& unit) {
  const auto root = instances::find(root_of(unit));
  return root != nullptr && root->running_calls > 0;
}

std::vector<Impl::Synced> synced_below(Unit& root) {
  std::vector<Impl::Synced> all;
  for (Unit* unit : root.with_those_below()) {
    all.push_back({unit->weak_from_this(), unit->policy.requires_gradient_sync, unit->policy.requires_all_reduce});
  }
  return all;
}

void check_idle(const std::shared_ptr<Unit>& unit, const char* operation) {
  const bool summoned = unit->runtime().any_unit([](const Unit& each) { return each.summoned > 0; });
  const char* state = summoned ? "SUMMON_FULL_PARAMS" : "FORWARD_BACKWARD";
  FSDP_CHECK(
      !summoned && !is_called(unit) && !unit->runtime().backward_runs(),
      "[{}] expected to be in states [IDLE] but current state is {}: call it between steps, outside of "
      "summon_full_params",
      operation,
      state);
}

} // namespace

ModuleClasses MixedPrecision::batch_norms() {
  return ModuleClasses::of<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>();
}

bool FSDPInstance::check_is_root() const {
  return impl_->unit("check_is_root")->parent() == nullptr;
}

ShardingStrategy FSDPInstance::sharding_strategy() const {
  return impl_->strategy;
}

const FSDPOptions& FSDPInstance::options() const {
  return impl_->options;
}

FSDPModule FSDPInstance::unit() const {
  return FSDPModule(impl_->unit("unit"));
}

std::vector<at::Tensor> FSDPInstance::parameters_between_steps(const char* operation) const {
  const auto unit = impl_->unit(operation);
  check_root(*unit, operation);
  check_idle(unit, operation);
  return fsdp::parameters(impl_->module(operation));
}

FSDPInstance::NoSync::NoSync(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {
  const auto unit = impl_->unit("no_sync");
  check_root(*unit, "no_sync");
  check_idle(unit, "no_sync");
  if (impl_->no_sync_guards++ == 0) {
    impl_->before_no_sync = synced_below(*unit);
  }
  FSDPModule(unit).set_requires_gradient_sync(false);
}

FSDPInstance::NoSync::~NoSync() {
  if (!impl_ || --impl_->no_sync_guards > 0) {
    return;
  }
  for (const auto& [weak, gradients, across_replicas] : std::exchange(impl_->before_no_sync, {})) {
    if (const auto unit = weak.lock()) {
      unit->policy.requires_gradient_sync = gradients;
      unit->policy.requires_all_reduce = across_replicas;
    }
  }
}

FSDPInstance::NoSync FSDPInstance::no_sync() const {
  return NoSync(impl_);
}

SummonedParams FSDPInstance::summon_full_params(const SummonOptions& options) const {
  const auto unit = impl_->unit("summon_full_params");
  FSDP_CHECK(
      !is_called(unit) && !unit->runtime().backward_runs(),
      "[summon_full_params] Cannot manually unshard parameters during forward/backward: call it between steps");
  FSDP_CHECK(
      !options.with_grads || impl_->options.use_orig_params,
      "[summon_full_params] with_grads is not supported where parameters are shown as one flat parameter: set "
      "use_orig_params = true");
  FSDP_CHECK(
      !(options.with_grads && options.offload_to_cpu),
      "[summon_full_params] with_grads and offload_to_cpu is not supported: leave one of them out");
  FSDP_CHECK(
      !(options.offload_to_cpu && impl_->strategy == ShardingStrategy::kNoShard),
      "[summon_full_params] offload_to_cpu and kNoShard is not supported: every rank has all parameters as it is");
  return fsdp::summon_full_params(impl_->module("summon_full_params"), options);
}

void FSDPInstance::apply(const std::function<void(torch::nn::Module&)>& function) const {
  check_idle(impl_->unit("apply"), "apply");
  torch::nn::Module& module = impl_->module("apply");
  auto guard = fsdp::summon_full_params(module);
  module.apply(function);
  guard.end();
}

void FSDPInstance::register_comm_hook(CommHook hook) const {
  const auto root = impl_->unit("register_comm_hook");
  check_root(*root, "register_comm_hook");
  FSDP_CHECK(hook, "[register_comm_hook] the hook is empty: give a function that fills its second argument");
  const auto instances = instances::below(impl_->module("register_comm_hook"));
  for (const auto& instance : instances) {
    FSDP_CHECK(
        !is_hybrid(instance->strategy),
        "[register_comm_hook] Communication hook is not supported for hybrid strategies: use kFullShard, kShardGradOp "
        "or kNoShard");
    FSDP_CHECK(
        !instance->has_comm_hook,
        "[register_comm_hook] A communication hook is already registered: one is all that a model can have");
  }
  for (const auto& instance : instances) {
    const FSDPModule unit(instance->unit("register_comm_hook"));
    instance->has_comm_hook = true;
    set_comm_hook(unit, hook, instance->strategy != ShardingStrategy::kNoShard);
    if (comm_hooks::compresses(hook)) {
      reduce_as_computed(unit);
    }
  }
}

FSDPInstance::Call::Call(const FSDPInstance& instance) {
  const auto root = root_of(instance.impl_->unit("forward"));
  impl_ = instances::find(root);
  if (impl_) { // else it is one that `fully_shard` has made
    root_call::prepare(*impl_);
    ++impl_->running_calls;
  }
}

FSDPInstance::Call::~Call() {
  if (impl_) {
    --impl_->running_calls;
  }
}

std::vector<FSDPInstance> fsdp_modules(ModuleRef module, bool root_only) {
  std::vector<FSDPInstance> found;
  for (const auto& instance : instances::below(module.for_operation("fsdp_modules"))) {
    if (!root_only || instance->unit("fsdp_modules")->parent() == nullptr) {
      found.emplace_back(instance);
    }
  }
  return found;
}

} // namespace fsdp
