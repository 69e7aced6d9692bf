#pragma once

#include <fsdp/export.h>
#include <fsdp/module_ref.h>
#include <fsdp/optim_state_dict.h>

/// From one form of an optimizer's state into another, under the names that PyTorch has for it: for programs that keep
/// states between taking and loading them. `load_optim_state_dict` needs none of these for what it takes. The optimizer
/// says which parameters it has, in which groups, and does not change; a state that is another optimizer's is an Error.
namespace fsdp {

/// This rank's pieces of a whole state, in memory of their own. Collective where shards were given other data, as all
/// of these.
FSDP_API ShardedOptimStateDict
shard_full_optim_state_dict(ModuleRef module, const torch::optim::Optimizer& optimizer, const OptimStateDict& state);

/// The same of the first rank's state; what the others give is not looked at, but where the model is not sharded: then
/// each rank is the first. One tensor at a time is whole. Collective.
FSDP_API ShardedOptimStateDict
scatter_full_optim_state_dict(ModuleRef module, const torch::optim::Optimizer& optimizer, const OptimStateDict& state);

/// The same of pieces that another sharding has left on the ranks of this module's mesh, of which there has to be one.
/// What a rank has whole of a parameter that is not sharded here either stays its own. One tensor at a time is whole.
/// Collective.
FSDP_API ShardedOptimStateDict flatten_sharded_optim_state_dict(
    ModuleRef module, const torch::optim::Optimizer& optimizer, const ShardedOptimStateDict& state);

enum class OptimStateKeyType {
  kParamName, ///< "layers.0.weight"
  kParamId, ///< "0", "1", ...: counted through the optimizer's groups, as optimizers of Python number theirs
};

/// The same state, in which parameters go by names or by numbers: what `state` has now is told from its keys, which are
/// the optimizer's parameters' all. Tied parameters have one number. The tensors are shared, not copied.
FSDP_API OptimStateDict rekey_optim_state_dict(
    ModuleRef module,
    const torch::optim::Optimizer& optimizer,
    const OptimStateDict& state,
    OptimStateKeyType key_type);

} // namespace fsdp
