#pragma once

#include <string>

#include <fsdp/optim_state_dict.h>

#include "state/optimizer_by_name.h"

/// The pieces that a rank's optimizer takes of a state.
namespace fsdp::state {

/// Null if it is not there.
template <typename Value>
const Value* tensor_in(const BasicOptimStateDict<Value>& dict, const std::string& name, const std::string& key) {
  const auto* state = dict.state.find(name);
  if (state == nullptr) {
    return nullptr;
  }
  const auto found = state->tensors.find(key);
  return found == state->tensors.end() ? nullptr : &found->second;
}

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
