// Makes the units of FullyShardedDataParallel.

#include <fsdp/fully_sharded_data_parallel.h>

#include <algorithm>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <fsdp/init.h>
#include <fsdp/sharded_tensor.h>

#include "base/check.h"
#include "base/env.h"
#include "base/format.h"
#include "base/log.h"
#include "engine/recorded_storage.h"
#include "engine/recording.h"
#include "engine/tenant.h"
#include "fsdp1/fsdp_instance.h"
#include "nn/make_unit.h"
#include "nn/registry.h"
#include "nn/slots.h"

namespace fsdp {

namespace {

constexpr const char* kOperation = "FullyShardedDataParallel";

bool is_hybrid_strategy(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::kHybridShard || strategy == ShardingStrategy::kHybridShardZero2;
}

const char* name_of(ShardingStrategy strategy) {
  constexpr const char* kNames[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"};
  return kNames[static_cast<int>(strategy)];
}

using Groups = std::pair<std::shared_ptr<Group>, std::shared_ptr<Group>>;

Mesh hybrid_mesh(const FSDPOptions& options) {
  if (options.device_mesh) {
    FSDP_CHECK(
        options.device_mesh->ndim() == 2,
        "[{}] {} needs a mesh of two dimensions, (replicate, shard), got {}",
        kOperation,
        name_of(options.sharding_strategy),
        options.device_mesh->str());
    return *options.device_mesh;
  }
  FSDP_CHECK(
      !std::holds_alternative<std::monostate>(options.process_group),
      "[{}] {} requires explicit specification of process group or device_mesh: give process_group = {{shard, "
      "replicate}}, or a mesh of (replicate, shard)",
      kOperation,
      name_of(options.sharding_strategy));
  const auto* groups = std::get_if<Groups>(&options.process_group);
  FSDP_CHECK(
      groups != nullptr && groups->first && groups->second,
      "[{}] Expected process_group to be passed in as the pair of groups to shard and to replicate over, for {}",
      kOperation,
      name_of(options.sharding_strategy));
  return Mesh::from_groups({groups->second, groups->first}, {"replicate", "shard"});
}

Mesh mesh_of_one_dimension(const FSDPOptions& options) {
  if (options.device_mesh) {
    FSDP_CHECK(
        options.device_mesh->ndim() == 1,
        "[{}] {} needs a mesh of one dimension, got {}: use a hybrid strategy, or slice it",
        kOperation,
        name_of(options.sharding_strategy),
        options.device_mesh->str());
    return *options.device_mesh;
  }
  FSDP_CHECK(
      !std::holds_alternative<Groups>(options.process_group),
      "[{}] two groups are for the hybrid strategies, but {} was asked for: give one group",
      kOperation,
      name_of(options.sharding_strategy));
  const auto* group = std::get_if<std::shared_ptr<Group>>(&options.process_group);
  return group != nullptr && *group ? Mesh::from_group(*group) : default_mesh();
}

/// Over which ranks units are cut, and by which strategy: where there is one rank there is nothing to cut.
std::pair<Mesh, ShardingStrategy> arrangement_of(const FSDPOptions& options) {
  const ShardingStrategy strategy = options.sharding_strategy;
  FSDP_CHECK(
      !options.device_mesh || std::holds_alternative<std::monostate>(options.process_group),
      "[{}] Cannot pass both process_group and device_mesh at the same time: leave one of them out",
      kOperation);
  if (is_hybrid_strategy(strategy)) {
    return {hybrid_mesh(options), strategy};
  }
  const Mesh mesh = mesh_of_one_dimension(options);
  if (mesh.numel() == 1) {
    if (strategy != ShardingStrategy::kNoShard) {
      log::warn_once(phrase(
          "[{}] FSDP is switching to use `NO_SHARD` instead of ShardingStrategy.{} since the world size is 1.",
          kOperation,
          name_of(strategy)));
    }
    return {mesh, ShardingStrategy::kNoShard};
  }
  if (strategy != ShardingStrategy::kNoShard) {
    return {mesh, strategy};
  }
  const auto whole = Mesh::from_groups({mesh.group(), group_of_one()}, {"replicate", "shard"}, mesh.device());
  return {whole, strategy};
}

/// Each module below once, and itself.
std::vector<torch::nn::Module*> all_below(torch::nn::Module& module) {
  std::vector<torch::nn::Module*> all;
  for (const auto& [path, each] : nn::modules_of(module)) {
    all.push_back(each);
  }
  return all;
}

/// What no unit takes, and what stays where it is: the states that were named, and all of the modules that were.
std::vector<at::Tensor> ignored_states_of(torch::nn::Module& root, const FSDPOptions& options) {
  FSDP_CHECK(
      options.ignored_modules.empty() || options.ignored_states.empty(),
      "[{}] Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states.",
      kOperation);
  std::vector<at::Tensor> ignored = options.ignored_states;
  for (const auto& reference : options.ignored_modules) {
    torch::nn::Module& module = reference.for_operation(kOperation);
    if (&module == &root) {
      log::warn(
          "[{}] Trying to ignore the top-level module passed into the FullyShardedDataParallel constructor itself "
          "will result in all parameters being ignored and is not well-supported: {}",
          kOperation,
          module.name());
    }
    for (auto* each : all_below(module)) {
      FSDP_CHECK(
          nn::registry::find(*each) == nullptr,
          "[{}] `ignored_modules` should not include FSDP modules, but '{}' is sharded: leave it out",
          kOperation,
          each->name());
      for (const auto& item : each->named_parameters(/*recurse=*/false)) {
        ignored.push_back(item.value());
      }
      for (const auto& buffer : each->buffers(/*recurse=*/false)) {
        ignored.push_back(buffer);
      }
    }
  }
  return ignored;
}

bool is_on_meta(const torch::nn::Module& module) {
  const auto on_meta = [](const std::vector<at::Tensor>& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.defined() && t.is_meta(); });
  };
  return on_meta(module.parameters(/*recurse=*/false)) || on_meta(module.buffers(/*recurse=*/false));
}

// Parents first, each module that has something of its own on the meta device.
void materialize(torch::nn::Module& module, const FSDPOptions& options) {
  std::unordered_set<const torch::nn::Module*> ignored;
  for (const auto& reference : options.ignored_modules) {
    const auto below = all_below(reference.for_operation(kOperation));
    ignored.insert(below.begin(), below.end());
  }
  for (auto* each : all_below(module)) {
    if (nn::registry::find(*each) != nullptr || ignored.count(each) > 0 || !is_on_meta(*each)) {
      continue;
    }
    FSDP_CHECK(
        options.param_init_fn,
        "[{}] '{}' is on the meta device, and has no values: give param_init_fn, which materializes and initializes a "
        "module's own parameters and buffers, or build it on the CPU",
        kOperation,
        each->name());
    options.param_init_fn(*each);
    FSDP_CHECK(
        !is_on_meta(*each),
        "[{}] param_init_fn has left '{}' on the meta device: let it give memory to all of the module's own parameters "
        "and buffers, by set_data",
        kOperation,
        each->name());
  }
}

void check_frozen(torch::nn::Module& module, const FSDPOptions& options, const std::vector<at::Tensor>& ignored) {
  std::unordered_set<const c10::TensorImpl*> left_out;
  for (const auto& tensor : ignored) {
    left_out.insert(tensor.unsafeGetTensorImpl());
  }
  std::vector<std::string> trainable, frozen;
  for (const auto& slot : nn::slots_of(module)) {
    if (engine::param_of(slot.tensor) == nullptr && left_out.count(slot.tensor.unsafeGetTensorImpl()) == 0) {
      (slot.tensor.requires_grad() ? trainable : frozen).push_back(slot.path);
    }
  }
  if (trainable.empty() || frozen.empty()) {
    return;
  }
  FSDP_CHECK(
      options.use_orig_params,
      "[{}] '{}' has both parameters with requires_grad=True and False. FSDP does not support wrapping such modules "
      "when use_orig_params=False: set use_orig_params = true, or wrap the frozen ones by themselves ({})",
      kOperation,
      module.name(),
      join(frozen));
  log::warn(
      "[{}] '{}' has both parameters with requires_grad=True and False. FSDP does not recommend wrapping such modules: "
      "the frozen ones ({}) are gathered with the others",
      kOperation,
      module.name(),
      join(frozen));
}

FullyShardOptions unit_options(const FSDPOptions& options, ShardingStrategy strategy, const Mesh& mesh) {
  FullyShardOptions unit;
  unit.mesh = mesh;
  if (strategy == ShardingStrategy::kShardGradOp || strategy == ShardingStrategy::kHybridShardZero2) {
    unit.reshard_after_forward = false;
  }
  const auto& precision = options.mixed_precision;
  unit.mp_policy = {
      .param_dtype = precision.param_dtype,
      .reduce_dtype = precision.reduce_dtype,
      .output_dtype = std::nullopt,
      .cast_forward_inputs = precision.cast_forward_inputs};
  if (options.cpu_offload.offload_params) {
    unit.offload_policy = CPUOffloadPolicy{};
  }
  unit.sync_module_states = options.sync_module_states;
  return unit;
}

engine::NextInBackward next_in_backward(const FSDPOptions& options) {
  if (!options.backward_prefetch) {
    return engine::NextInBackward::kNever;
  }
  return *options.backward_prefetch == BackwardPrefetch::kBackwardPre ? engine::NextInBackward::kWhenUsed
                                                                      : engine::NextInBackward::kWhenDone;
}

std::shared_ptr<FSDPInstance::Impl> make_instance(
    torch::nn::Module& module, const FSDPOptions& options, const std::vector<at::Tensor>& ignored) {
  check_frozen(module, options, ignored);
  const auto [mesh, strategy] = arrangement_of(options);
  auto for_unit = unit_options(options, strategy, mesh);
  for_unit.ignored_params = ignored;
  const nn::FlatCut cut{.alignment = options.use_orig_params ? 16 : 1, .shown_as_one = !options.use_orig_params};
  const auto unit = nn::make_unit({&module}, for_unit, cut);
  unit->policy.shows_waiting_gradients = true;
  unit->policy.keep_gradient_dtype = options.mixed_precision.keep_low_precision_grads;
  unit->policy.casts_inputs_as_root = options.mixed_precision.cast_root_forward_inputs;
  unit->policy.next_in_backward = next_in_backward(options);
  auto instance = std::make_shared<FSDPInstance::Impl>();
  instance->weak_unit = unit;
  instance->weak_module = module.weak_from_this();
  instance->options = options;
  instance->options.auto_wrap_policy.reset();
  instance->options.param_init_fn = nullptr;
  instance->strategy = strategy;
  instance->full_precision_in_eval = env::flag("FSDP_USE_FULL_PREC_IN_EVAL").value_or(false);
  unit->companion = instance;
  return instance;
}

bool is_mixed(const MixedPrecision& precision) {
  return precision.param_dtype || precision.reduce_dtype || precision.buffer_dtype;
}

AutoWrapPolicy with_full_precision(torch::nn::Module& module, const FSDPOptions& options) {
  const auto& classes = options.mixed_precision.module_classes_to_ignore;
  const auto all = all_below(module);
  const bool any = std::any_of(all.begin(), all.end(), [&](const auto* each) { return classes.contain(*each); });
  if (!is_mixed(options.mixed_precision) || !any) {
    return *options.auto_wrap_policy;
  }
  log::warn(
      "[{}] Both mixed precision and an auto_wrap_policy were specified, and some submodules are of the classes that "
      "mixed precision is not for (BatchNorm, unless module_classes_to_ignore says otherwise). These submodules will "
      "be wrapped as separate units with mixed precision disabled.",
      kOperation);
  return options.auto_wrap_policy->and_individually(
      classes, [](FSDPOptions& of_unit) { of_unit.mixed_precision = MixedPrecision{}; });
}

void wrap_below(torch::nn::Module& module, const FSDPOptions& options, const std::vector<at::Tensor>& ignored) {
  const IgnoredStates states{.modules = options.ignored_modules, .params = ignored};
  for (const auto& chosen : modules_to_wrap(module, with_full_precision(module, options), states)) {
    FSDPOptions of_unit = options;
    of_unit.auto_wrap_policy.reset();
    if (chosen.change) {
      chosen.change(of_unit);
    }
    make_instance(*chosen.module, of_unit, ignored);
  }
}

void move(torch::nn::Module& module, c10::Device device, const std::vector<at::Tensor>& ignored) {
  const at::NoGradGuard no_grad;
  const auto stays = [&](const at::Tensor& tensor) {
    return std::any_of(ignored.begin(), ignored.end(), [&](const auto& each) { return each.is_same(tensor); });
  };
  for (auto* each : all_below(module)) {
    auto tensors = each->parameters(/*recurse=*/false);
    const auto buffers = each->buffers(/*recurse=*/false);
    tensors.insert(tensors.end(), buffers.begin(), buffers.end());
    for (auto& tensor : tensors) {
      const bool has_values = tensor.defined() && !tensor.is_meta() && engine::recorded_storage_of(tensor) == nullptr;
      if (has_values && tensor.device() != device && !is_sharded(tensor) && !stays(tensor)) {
        tensor.set_data(tensor.to(device));
      }
    }
  }
}

thread_local std::vector<FSDPOptions> enabled;

} // namespace

FSDPInstance detail::wrap_module(torch::nn::Module& module, const FSDPOptions& options) {
  const engine::Recording::Pause pause; // of `deferred_init`, where modules are wrapped as they are made
  if (const auto unit = nn::registry::find(module)) { // again: nothing is left to wrap
    const auto instance = instances::find(unit);
    FSDP_CHECK(
        instance != nullptr,
        "[{}] fully_shard was called on this module ({}) before: use one of the two",
        kOperation,
        module.name());
    return FSDPInstance(instance);
  }
  FSDP_CHECK(
      !options.device_id || options.device_id->type() == arrangement_of(options).first.device().type(),
      "[{}] Inconsistent compute device: the ranks' group is on '{}', device_id is '{}'",
      kOperation,
      arrangement_of(options).first.device(),
      options.device_id.value_or(c10::kCPU));
  const auto ignored = ignored_states_of(module, options);
  materialize(module, options);
  if (options.device_id) {
    move(module, *options.device_id, ignored);
  }
  if (options.auto_wrap_policy) {
    wrap_below(module, options, ignored);
  }
  return FSDPInstance(make_instance(module, options, ignored));
}

EnableWrap::EnableWrap(FSDPOptions options) {
  enabled.push_back(std::move(options));
}

EnableWrap::~EnableWrap() {
  enabled.pop_back();
}

void detail::wrap_if_enabled(torch::nn::Module& module, const WrapOverride& change) {
  if (enabled.empty()) {
    return;
  }
  FSDPOptions options = enabled.back();
  if (change) {
    change(options);
  }
  wrap_module(module, options);
}

} // namespace fsdp
