#pragma once

#include <optional>
#include <string>

#include <fsdp/mesh.h>
#include <fsdp/optim_state_dict.h>

#include "state/optim_pieces.h"

namespace fsdp::state {

/// An optimizer's state of which each rank of the model's mesh has pieces, cut in whatever way, put together tensor by
/// tensor.
class GatheredPieces {
 public:
  /// An Error if there are not all elements. Collective.
  GatheredPieces(const OptimizerOfModel& here, const ShardedOptimStateDict& mine);

  /// What any rank has, without elements.
  const OptimStateDict& outline() const {
    return outline_;
  }
  /// One of the outline's tensors. Collective.
  at::Tensor whole(const std::string& name, const std::string& key, const at::Tensor& like) const;

 private:
  const HeldTensor* mine(const std::string& name, const std::string& key) const;
  /// Of those that have the same elements one rank gives them.
  bool gives(const HeldTensor& piece) const;
  void agree_on_outline();
  void check_complete() const;
  void sum_over_ranks(const at::Tensor& numbers) const;

  const ShardedOptimStateDict& mine_;
  Label label_;
  bool is_first_;
  std::optional<Mesh> mesh_; // unset where nothing is sharded: then each rank has to have all
  OptimStateDict outline_;
};

} // namespace fsdp::state
