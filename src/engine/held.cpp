#include <fsdp/held.h>

#include <utility>

#include "base/check.h"
#include "engine/bucket.h"
#include "engine/tenant.h"
#include "layout/param_layout.h"

namespace fsdp {

namespace {

HeldTensor held_whole(const at::Tensor& tensor) {
  const bool dense = layout::is_dense(tensor.sizes(), tensor.strides());
  HeldTensor held;
  held.sizes = tensor.sizes().vec();
  held.strides = dense ? tensor.strides().vec() : layout::contiguous_strides(tensor.sizes());
  held.extent = Extent::one_run(0, tensor.numel());
  held.local = tensor;
  return held;
}

// Shards are cut along a mesh's last dimension, and alike along all others.
bool is_first_replica(const Mesh& mesh) {
  for (int dim = 0; dim + 1 < mesh.ndim(); ++dim) {
    if (mesh.coordinate(dim) != 0) {
      return false;
    }
  }
  return true;
}

} // namespace

HeldTensor held(const at::Tensor& tensor) {
  const engine::Param* param = engine::param_of(tensor);
  if (param == nullptr) {
    return held_whole(tensor);
  }
  FSDP_CHECK(
      !engine::is_handle(tensor),
      "[held] a parameter's shard is needed, as model->parameters() gives it after fully_shard; this is the handle of "
      "'{}'",
      param->name());
  const auto& layout = param->layout();
  const Mesh& mesh = param->bucket().mesh();
  return {
      param->name(),
      layout.sizes(),
      layout.strides(),
      layout.extent(param->rank()),
      param->shard(),
      mesh,
      is_first_replica(mesh)};
}

HeldTensor like(const HeldTensor& held, const at::Tensor& tensor) {
  FSDP_CHECK(
      tensor.sizes() == held.local.sizes(),
      "[held] what this rank has of '{}' has sizes {}, so a tensor of sizes {} is not cut alike",
      held.name,
      held.local.sizes(),
      tensor.sizes());
  HeldTensor other = held;
  other.local = tensor;
  return other;
}

} // namespace fsdp
