#pragma once

#include <functional>
#include <optional>
#include <utility>
#include <variant>

#include <fsdp/export.h>
#include <fsdp/module_ref.h>
#include <fsdp/optim_state_dict.h>
#include <fsdp/state_dict.h>

/// For programs that set the form of a `FullyShardedDataParallel` model's state dicts in one place and take them in
/// another. Elsewhere call `full_state_dict`, `sharded_state_dict` and their likes, whose results have one type.
namespace fsdp {

enum class StateDictType {
  kFullStateDict, ///< whole values
  kLocalStateDict, ///< flat parameters as they lie on this rank
  kShardedStateDict, ///< this rank's pieces of each parameter
};

using FullStateDictConfig = FullStateDictOptions;
struct LocalStateDictConfig {
  bool offload_to_cpu = false; ///< copies in host memory
};
struct ShardedStateDictConfig {
  bool offload_to_cpu = false;
};
using StateDictConfig = std::variant<FullStateDictConfig, LocalStateDictConfig, ShardedStateDictConfig>;

struct FullOptimStateDictConfig : FullStateDictOptions {};
struct LocalOptimStateDictConfig {
  bool offload_to_cpu = false;
};
struct ShardedOptimStateDictConfig {
  bool offload_to_cpu = true;
};
using OptimStateDictConfig =
    std::variant<FullOptimStateDictConfig, LocalOptimStateDictConfig, ShardedOptimStateDictConfig>;

struct StateDictSettings {
  StateDictType state_dict_type = StateDictType::kFullStateDict;
  StateDictConfig state_dict_config = FullStateDictConfig();
  OptimStateDictConfig optim_state_dict_config = FullOptimStateDictConfig();
};

/// Of all `FullyShardedDataParallel` instances in the module; what was set before. A configuration that is not given is
/// the type's default; one of another type is an Error.
FSDP_API StateDictSettings set_state_dict_type(
    ModuleRef module,
    StateDictType type,
    const std::optional<StateDictConfig>& config = std::nullopt,
    const std::optional<OptimStateDictConfig>& optim_config = std::nullopt);
/// An Error where instances differ.
FSDP_API StateDictSettings get_state_dict_type(ModuleRef module);

/// While it lives, the settings are those it was made with; afterwards what they were before.
class FSDP_API StateDictTypeGuard {
 public:
  explicit StateDictTypeGuard(std::function<void()> restore) : restore_(std::move(restore)) {}
  StateDictTypeGuard(StateDictTypeGuard&& other) noexcept : restore_(std::exchange(other.restore_, nullptr)) {}
  StateDictTypeGuard& operator=(StateDictTypeGuard&&) = delete;
  ~StateDictTypeGuard();

 private:
  std::function<void()> restore_;
};
[[nodiscard]] FSDP_API StateDictTypeGuard state_dict_type(
    ModuleRef module,
    StateDictType type,
    const std::optional<StateDictConfig>& config = std::nullopt,
    const std::optional<OptimStateDictConfig>& optim_config = std::nullopt);

/// Whole values and flat parameters are a `StateDict`.
using AnyStateDict = std::variant<StateDict, ShardedStateDict>;
using AnyOptimStateDict = std::variant<OptimStateDict, ShardedOptimStateDict>;

/// By the settings; with kNoShard whole values whatever they say. Collective, unless pieces are asked for.
FSDP_API AnyStateDict state_dict(ModuleRef module);
/// What `state_dict` has given under the same settings. Whole values go into any model, and pieces where they came
/// from.
FSDP_API IncompatibleKeys
load_state_dict(ModuleRef module, const AnyStateDict& state, const LoadStateDictOptions& options = {});
FSDP_API AnyOptimStateDict optim_state_dict(ModuleRef module, const torch::optim::Optimizer& optimizer);
/// This rank's pieces of either, for this model's sharding, as `load_optim_state_dict` takes them. Collective for
/// pieces, and where by the settings the first rank alone has the whole state, as is loading it.
FSDP_API ShardedOptimStateDict
optim_state_dict_to_load(ModuleRef module, const torch::optim::Optimizer& optimizer, const AnyOptimStateDict& state);
FSDP_API void load_optim_state_dict(
    ModuleRef module, torch::optim::Optimizer& optimizer, const AnyOptimStateDict& state);

} // namespace fsdp
