#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <fsdp/mesh.h>
#include <fsdp/optim_state_dict.h>

#include "state/optim_pieces.h"

namespace fsdp::state {

/// An optimizer's state of which each rank of the model's mesh has pieces, cut in whatever way, put together tensor by
/// tensor. What each rank has by itself, and needs by itself, is its own.
class GatheredPieces {
 public:
  /// An Error on all ranks if it is another optimizer's, or there is not each element once. Collective.
  GatheredPieces(const OptimizerOfModel& here, const ShardedOptimStateDict& mine);
  GatheredPieces(const GatheredPieces&) = delete;

  /// What any rank has, without elements.
  const OptimStateDict& outline() const {
    return outline_;
  }
  /// One of the outline's tensors. Collective.
  at::Tensor whole(const std::string& name, const std::string& key, const at::Tensor& like) const;

 private:
  bool is_own(const std::string& name, const ShardedOptimStateDict::ParamState& state) const;
  /// Of those that have the same elements one rank gives them.
  bool gives(const HeldTensor& piece) const;
  OptimStateDict outline_of(const ShardedOptimStateDict& pieces, bool own) const;
  void agree_on_outline();
  void add_own_and_check();
  void check_complete() const;
  void check_values() const;
  void sum_over_ranks(const at::Tensor& numbers) const;

  const OptimizerOfModel& here_;
  const ShardedOptimStateDict& mine_;
  Label label_;
  bool is_first_;
  std::optional<Mesh> mesh_; // unset where nothing is sharded: then each rank has to have all
  std::unordered_set<std::string> own_; // names of states that are this rank's own
  OptimStateDict outline_;
};

} // namespace fsdp::state
