#pragma once

#include <vector>

#include <fsdp/optim_state_dict.h>

#include "state/named_tensors.h"
#include "state/optimizer_by_name.h"

/// The pieces that a rank's optimizer takes of a state.
namespace fsdp::state {

/// A model's optimizer, for the time of a call.
struct OptimizerOfModel {
  OptimizerOfModel(ModuleRef module, const torch::optim::Optimizer& given, const char* name_of_call)
      : operation(name_of_call),
        optimizer(given),
        tensors(named_tensors(module, operation)),
        by_name(tensors, optimizer, operation) {}
  OptimizerOfModel(const OptimizerOfModel&) = delete; // one points into the other

  const char* operation;
  const torch::optim::Optimizer& optimizer;
  std::vector<NamedTensor> tensors;
  OptimizerByName by_name;
};

/// In memory of its own, as a state that the optimizer itself makes.
at::Tensor like_leaf(const at::Tensor& piece, const NamedTensor& param);
bool is_like_leaf(const at::Tensor& piece, const NamedTensor& param);

/// Of a whole state; copies. An Error, with all complaints, if it is another optimizer's, as from the functions below.
ShardedOptimStateDict pieces_of_whole(const OptimizerOfModel& here, const OptimStateDict& state);
/// Of the first rank's. Collective.
ShardedOptimStateDict pieces_of_first_rank(const OptimizerOfModel& here, const OptimStateDict& state);
/// Of what lies on all ranks of the model's mesh, cut in whatever way. Collective.
ShardedOptimStateDict pieces_of_all_ranks(const OptimizerOfModel& here, const ShardedOptimStateDict& state);

} // namespace fsdp::state
