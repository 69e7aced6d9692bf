#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/held.h>
#include <fsdp/module_ref.h>

#include "engine/flat_shard.h"
#include "engine/param.h"
#include "layout/elements.h"

namespace fsdp::state {

/// A parameter or buffer of a model, by a name that the unsharded model has too.
struct NamedTensor {
  std::string name{};
  at::Tensor tensor{}; ///< as it is registered: a shard, a handle where those stay, or what is not sharded
  engine::Param* param = nullptr; ///< null unless it is sharded
  bool is_buffer = false;

  c10::IntArrayRef sizes() const {
    return param != nullptr ? c10::IntArrayRef(param->layout().sizes()) : tensor.sizes();
  }
  const at::Tensor& leaf() const {
    return param != nullptr ? param->shard() : tensor;
  }
  /// In which a state dict has it: a buffer's is not the one that it was lowered to.
  c10::ScalarType saved_dtype() const;
  /// Null unless the leaf is shown as a part of a flat parameter.
  engine::FlatShard* flat() const;
  /// What optimizers are given: the leaf, or the flat parameter.
  const at::Tensor& trained() const;
};

/// In the order of the modules, each module's parameters before its buffers; what has several names is there under
/// each. An error while some are shown whole. Collective where shards were given other data.
std::vector<NamedTensor> named_tensors(ModuleRef module, const char* operation);
/// The units of these, each once.
std::vector<std::shared_ptr<engine::Unit>> units_of(const std::vector<NamedTensor>& tensors);
/// Whether this rank is the first of all meshes on which these lie.
bool is_first_rank(const std::vector<NamedTensor>& tensors);
/// What this rank has of one.
HeldTensor held(const NamedTensor& tensor, bool first_rank);

/// Of the whole.
inline c10::IntArrayRef sizes_of(const at::Tensor& whole) {
  return whole.sizes();
}
inline c10::IntArrayRef sizes_of(const HeldTensor& held) {
  return held.sizes;
}

inline layout::PieceOfWhole as_piece(const HeldTensor& held) {
  return {held.sizes, held.strides, held.extent, held.local};
}

} // namespace fsdp::state
