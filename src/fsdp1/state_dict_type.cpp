#include <fsdp/state_dict_type.h>

#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include "base/check.h"
#include "base/format.h"
#include "base/log.h"
#include "fsdp1/fsdp_instance.h"
#include "nn/slots.h"
#include "state/comparison.h"
#include "state/optim_pieces.h"

namespace fsdp {

namespace {

using state::NamedTensor;

using Instances = std::vector<std::shared_ptr<FSDPInstance::Impl>>;

const char* type_name(StateDictType type) {
  constexpr const char* kNames[] = {"kFullStateDict", "kLocalStateDict", "kShardedStateDict"};
  return kNames[static_cast<int>(type)];
}

StateDictSettings default_settings(StateDictType type) {
  switch (type) {
    case StateDictType::kLocalStateDict:
      return {type, LocalStateDictConfig(), LocalOptimStateDictConfig()};
    case StateDictType::kShardedStateDict:
      return {type, ShardedStateDictConfig(), ShardedOptimStateDictConfig()};
    default:
      return {type, FullStateDictConfig(), FullOptimStateDictConfig()};
  }
}

template <typename Config>
void choose(Config& config, const std::optional<Config>& given, StateDictType type, const char* what) {
  FSDP_CHECK(
      !given || given->index() == config.index(),
      "[set_state_dict_type] Expected {} of type {}, got another type's: give that type's, or none",
      what,
      type_name(type));
  config = given.value_or(config);
}

std::string name_of(const FSDPInstance::Impl& instance) {
  const auto unit = instance.weak_unit.lock();
  return unit ? unit->display_name() : "";
}

Instances instances_of(torch::nn::Module& module) {
  auto found = instances::below(module);
  FSDP_CHECK(
      !found.empty(),
      "[set_state_dict_type] '{}' has no FullyShardedDataParallel in it: call full_state_dict or sharded_state_dict, "
      "which take any model",
      module.name());
  return found;
}

bool same(const FullStateDictOptions& a, const FullStateDictOptions& b) {
  return a.rank0_only == b.rank0_only && a.offload_to_cpu == b.offload_to_cpu;
}

template <typename Config>
bool same(const Config& a, const Config& b) {
  return a.offload_to_cpu == b.offload_to_cpu;
}

template <typename... Configs>
bool same(const std::variant<Configs...>& a, const std::variant<Configs...>& b) {
  const auto both = [](const auto& left, const auto& right) {
    if constexpr (std::is_same_v<decltype(left), decltype(right)>) {
      return same(left, right);
    }
    return false;
  };
  return std::visit(both, a, b);
}

bool same(const StateDictSettings& a, const StateDictSettings& b) {
  return a.state_dict_type == b.state_dict_type && same(a.state_dict_config, b.state_dict_config) &&
         same(a.optim_state_dict_config, b.optim_state_dict_config);
}

/// With kNoShard there are no pieces.
StateDictSettings effective_settings(torch::nn::Module& module) {
  const StateDictSettings settings = get_state_dict_type(module);
  const auto all = instances::below(module);
  const bool whole = std::any_of(
      all.begin(), all.end(), [](const auto& each) { return each->strategy == ShardingStrategy::kNoShard; });
  if (!whole || settings.state_dict_type == StateDictType::kFullStateDict) {
    return settings;
  }
  log::warn(
      "[state_dict] {} was asked for where kNoShard leaves nothing to cut: whole values are given",
      type_name(settings.state_dict_type));
  return default_settings(StateDictType::kFullStateDict);
}

/// What each module has itself, flat parameters in the places of what lies in them.
std::vector<NamedTensor> registered_tensors(torch::nn::Module& module, const char* operation) {
  for (const auto& instance : instances::below(module)) {
    FSDP_CHECK(
        !instance->options.use_orig_params,
        "[{}] kLocalStateDict is of flat parameters, which use_orig_params = true does not show: use "
        "kShardedStateDict",
        operation);
  }
  nn::settle_replaced_shards(module);
  std::vector<NamedTensor> all;
  for (const auto& [path, each] : nn::modules_of(module)) {
    const auto add = [&all, prefix = path.empty() ? "" : path + "."](const auto& tensors, bool are_buffers) {
      for (const auto& item : tensors) {
        if (item.value().defined()) {
          all.push_back({.name = prefix + item.key(), .tensor = item.value(), .is_buffer = are_buffers});
        }
      }
    };
    add(nn::registered_parameters(*each), /*are_buffers=*/false);
    add(each->named_buffers(/*recurse=*/false), /*are_buffers=*/true);
  }
  return all;
}

StateDict local_state_dict(torch::nn::Module& module, const LocalStateDictConfig& config) {
  StateDict state;
  for (const auto& each : registered_tensors(module, "state_dict")) {
    const at::Tensor value = each.tensor.detach().to(each.saved_dtype());
    state.insert(each.name, config.offload_to_cpu ? value.cpu().clone() : value);
  }
  return state;
}

IncompatibleKeys load_local(torch::nn::Module& module, const StateDict& state, bool strict) {
  const auto all = registered_tensors(module, "load_state_dict");
  IncompatibleKeys keys = state::compare(all, state);
  const auto lines = state::complaints(all, state, keys, strict);
  FSDP_CHECK(
      lines.empty(),
      "[load_state_dict] the flat parameters are another model's, or of another number of ranks, and none was "
      "loaded:\n{}\nA kFullStateDict goes into any sharding",
      join(lines, "\n"));
  const c10::NoGradGuard no_grad;
  for (const auto& here : all) {
    if (const at::Tensor* there = state.find(here.name)) {
      at::Tensor(here.tensor).copy_(*there);
    }
  }
  return keys;
}

HeldTensor in_host_memory(HeldTensor held) {
  held.local = held.local.detach().cpu().clone();
  return held;
}

ShardedStateDict sharded_state(torch::nn::Module& module, const ShardedStateDictConfig& config) {
  const ShardedStateDict state = sharded_state_dict(module);
  if (!config.offload_to_cpu) {
    return state;
  }
  ShardedStateDict copies;
  for (const auto& item : state) {
    copies.insert(item.key(), in_host_memory(item.value()));
  }
  return copies;
}

/// What `optim_state_dict` gives by the settings.
bool is_of_first_rank(torch::nn::Module& module) {
  const OptimStateDictConfig config = effective_settings(module).optim_state_dict_config;
  const auto* full = std::get_if<FullOptimStateDictConfig>(&config);
  return full != nullptr && full->rank0_only;
}

} // namespace

StateDictSettings set_state_dict_type(
    ModuleRef given,
    StateDictType type,
    const std::optional<StateDictConfig>& config,
    const std::optional<OptimStateDictConfig>& optim_config) {
  torch::nn::Module& module = given.for_operation("set_state_dict_type");
  const auto all = instances_of(module);
  StateDictSettings settings = default_settings(type);
  choose(settings.state_dict_config, config, type, "state_dict_config");
  choose(settings.optim_state_dict_config, optim_config, type, "optim_state_dict_config");
  const StateDictSettings former = get_state_dict_type(module);
  for (const auto& instance : all) {
    instance->state_dict_settings = settings;
  }
  return former;
}

StateDictSettings get_state_dict_type(ModuleRef given) {
  const auto all = instances::below(given.for_operation("get_state_dict_type"));
  for (const auto& instance : all) {
    FSDP_CHECK(
        same(instance->state_dict_settings, all[0]->state_dict_settings),
        "[state_dict_type] All FSDP modules must have the same state dict settings, but '{}' has others than the "
        "outermost: end its state_dict_type guard, or set_state_dict_type on it to what the outermost has, first",
        name_of(*instance));
  }
  return all.empty() ? StateDictSettings() : all[0]->state_dict_settings;
}

StateDictTypeGuard::~StateDictTypeGuard() {
  if (restore_) {
    restore_();
  }
}

StateDictTypeGuard state_dict_type(
    ModuleRef given,
    StateDictType type,
    const std::optional<StateDictConfig>& config,
    const std::optional<OptimStateDictConfig>& optim_config) {
  torch::nn::Module& module = given.for_operation("state_dict_type");
  const StateDictSettings former = set_state_dict_type(module, type, config, optim_config);
  return StateDictTypeGuard([all = instances_of(module), former] {
    for (const auto& instance : all) {
      instance->state_dict_settings = former;
    }
  });
}

AnyStateDict state_dict(ModuleRef given) {
  torch::nn::Module& module = given.for_operation("state_dict");
  const StateDictConfig config = effective_settings(module).state_dict_config;
  if (const auto* local = std::get_if<LocalStateDictConfig>(&config)) {
    return local_state_dict(module, *local);
  }
  if (const auto* sharded = std::get_if<ShardedStateDictConfig>(&config)) {
    return sharded_state(module, *sharded);
  }
  return full_state_dict(module, std::get<FullStateDictConfig>(config));
}

IncompatibleKeys load_state_dict(ModuleRef given, const AnyStateDict& state, const LoadStateDictOptions& options) {
  torch::nn::Module& module = given.for_operation("load_state_dict");
  const auto* values = std::get_if<StateDict>(&state);
  if (values == nullptr) {
    return load_state_dict(module, std::get<ShardedStateDict>(state), options);
  }
  return effective_settings(module).state_dict_type == StateDictType::kLocalStateDict
             ? load_local(module, *values, options.strict)
             : load_state_dict(module, *values, options);
}

AnyOptimStateDict optim_state_dict(ModuleRef given, const torch::optim::Optimizer& optimizer) {
  torch::nn::Module& module = given.for_operation("optim_state_dict");
  const OptimStateDictConfig config = effective_settings(module).optim_state_dict_config;
  if (const auto* full = std::get_if<FullOptimStateDictConfig>(&config)) {
    return full_optim_state_dict(module, optimizer, *full);
  }
  ShardedOptimStateDict state = sharded_optim_state_dict(module, optimizer);
  const auto* sharded = std::get_if<ShardedOptimStateDictConfig>(&config);
  FSDP_CHECK(
      sharded != nullptr,
      "[optim_state_dict] optimizers' states go by parameters' names, which kLocalStateDict does not have: use "
      "kShardedStateDict");
  if (sharded->offload_to_cpu) {
    for (auto& item : state.state) {
      for (auto& [key, held] : item.value().tensors) {
        held = in_host_memory(held);
      }
    }
  }
  return state;
}

ShardedOptimStateDict optim_state_dict_to_load(
    ModuleRef given, const torch::optim::Optimizer& optimizer, const AnyOptimStateDict& state) {
  torch::nn::Module& module = given.for_operation("optim_state_dict_to_load");
  const state::OptimizerOfModel here(module, optimizer, "optim_state_dict_to_load");
  const auto* whole = std::get_if<OptimStateDict>(&state);
  if (whole == nullptr) {
    return pieces_of_all_ranks(here, std::get<ShardedOptimStateDict>(state));
  }
  return is_of_first_rank(module) ? pieces_of_first_rank(here, *whole) : pieces_of_whole(here, *whole);
}

void load_optim_state_dict(ModuleRef given, torch::optim::Optimizer& optimizer, const AnyOptimStateDict& state) {
  torch::nn::Module& module = given.for_operation("load_optim_state_dict");
  if (const auto* pieces = std::get_if<ShardedOptimStateDict>(&state)) {
    return load_optim_state_dict(module, optimizer, *pieces);
  }
  load_optim_state_dict(
      module, optimizer, std::get<OptimStateDict>(state), {.broadcast_from_rank0 = is_of_first_rank(module)});
}

} // namespace fsdp
