#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/group.h>
#include <fsdp/mesh.h>

#include "state/named_tensors.h"

namespace fsdp::state {

/// Where the first rank has all values: its word, and its tensors, go to the others of the mesh on which a model lies.
class FromFirstRank {
 public:
  FromFirstRank(const std::vector<NamedTensor>& tensors, const char* operation);

  bool is_first() const {
    return is_first_;
  }
  /// Among whose ranks; unset where nothing is sharded.
  const std::optional<Mesh>& mesh() const {
    return mesh_;
  }
  /// The first rank's. Collective.
  std::string text(std::string mine) const;
  /// An Error on all ranks if one has other tensors than the first: what is not sharded may differ. Collective.
  void check_alike(const std::vector<NamedTensor>& tensors) const;
  /// The first rank's, on the mesh's device. Collective. `mine` is of no interest on the other ranks, where it may be
  /// null.
  at::Tensor values(c10::IntArrayRef sizes, c10::ScalarType dtype, const at::Tensor* mine) const;

 private:
  Label label_;
  bool is_first_;
  std::optional<Mesh> mesh_; // if unset, every rank is the first
};

} // namespace fsdp::state
