#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/ordered_dict.h>

#include <fsdp/export.h>
#include <fsdp/held.h>
#include <fsdp/module_ref.h>
#include <fsdp/state_dict.h>

namespace torch::optim {
class Optimizer;
}

namespace fsdp {

/// An optimizer's state by the names of the unsharded model's parameters; a tied parameter is there once, under its
/// first name. Names within are PyTorch's ("exp_avg", "step", "lr", "betas"): numbers, booleans and tuples of numbers.
template <typename Value>
struct BasicOptimStateDict {
  struct ParamState {
    std::map<std::string, Value> tensors{}; ///< each has the parameter's sizes
    std::map<std::string, c10::IValue> scalars{};
  };
  struct ParamGroup {
    std::vector<std::string> params{};
    std::map<std::string, c10::IValue> options{};
  };
  /// In the model's order; parameters that were never updated (frozen, unused) are absent.
  torch::OrderedDict<std::string, ParamState> state{};
  std::vector<ParamGroup> param_groups{};
};

using OptimStateDict = BasicOptimStateDict<at::Tensor>; ///< of whole tensors
using ShardedOptimStateDict = BasicOptimStateDict<HeldTensor>; ///< of what this rank has

/// The whole state: copies, the same from whatever sharding, and of a model that is not sharded. Put together unit by
/// unit, so that beside the result no more than one unit is whole. Of torch::optim's SGD, Adam, AdamW, Adagrad and
/// RMSprop, and fsdp::optim::AdamW. Parameters that the optimizer was given have to be the module's. Collective.
FSDP_API OptimStateDict full_optim_state_dict(
    ModuleRef module, const torch::optim::Optimizer& optimizer, const FullStateDictOptions& options = {});

/// This rank's pieces, which go on changing as training does. Nothing is communicated, as by `held`.
FSDP_API ShardedOptimStateDict sharded_optim_state_dict(ModuleRef module, const torch::optim::Optimizer& optimizer);

struct LoadOptimStateDictOptions {
  bool broadcast_from_rank0 = false; ///< the other ranks give an empty one, and get the first's state
};

/// Gives an optimizer of the same kind, with the same groups of parameters, the state of another, whatever the
/// sharding: of each tensor a rank takes its piece. Hyper-parameters come with it, and what has no state there has none
/// afterwards (Adagrad's, which is there before the first step, stays). Nothing changes if there is an error. With
/// `broadcast_from_rank0` collective, and then one tensor at a time is whole.
FSDP_API void load_optim_state_dict(
    ModuleRef module,
    torch::optim::Optimizer& optimizer,
    const OptimStateDict& state,
    const LoadOptimStateDictOptions& options = {});

/// The same from pieces, which have to hold no less than this rank needs: of the same sharding, or whole.
FSDP_API void load_optim_state_dict(
    ModuleRef module, torch::optim::Optimizer& optimizer, const ShardedOptimStateDict& state);

} // namespace fsdp
