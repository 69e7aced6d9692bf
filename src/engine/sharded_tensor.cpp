#include <fsdp/sharded_tensor.h>

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "base/check.h"
#include "engine/bucket.h"
#include "engine/internal_scope.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"

namespace fsdp {

namespace {

const engine::Param& param_behind(const at::Tensor& shard) {
  const engine::Param* param = engine::param_of(shard);
  FSDP_CHECK(
      param != nullptr && !engine::is_handle(shard),
      "[sharded] a parameter's shard is needed, as model->parameters() gives it after fully_shard; this is ",
      param != nullptr ? "the handle of '" + param->name() + "'" : std::string("another tensor"));
  return *param;
}

// Every rank's `local` (this rank's slice of a parameter, or of its gradient) put together, where `local` is: what is
// offloaded travels over the device, which is what the group serves.
at::Tensor put_together(const engine::Param& param, const at::Tensor& local, const char* operation) {
  engine::InternalScope scope;
  const auto& layout = param.layout();
  const auto on_device = local.options().device(param.unit().device()).requires_grad(false);
  Group& group = param.bucket().shard_group();
  const Label label{operation, param.name()};
  auto home = group.make_home(
      {Piece{layout.numel(), layout.chunk(), local.scalar_type(), local.scalar_type()}}, {on_device.device()}, label);
  home->begin_write(label);
  const int rank = param.rank();
  at::from_blob(home->slice(0), layout.shard_sizes(rank), layout.shard_strides(rank), on_device).copy_(local);
  auto gathered = home->gather(label);
  gathered->wait();
  auto slices = param.flat_view_of_whole(gathered->piece(0), local.scalar_type(), on_device.device());
  auto whole = at::empty_strided(layout.sizes(), layout.strides(), slices.options());
  if (layout.in_place()) {
    at::as_strided(whole, {layout.numel()}, {1}).copy_(slices);
  } else {
    layout.unpack(slices, whole);
  }
  group.barrier(label); // nobody reads this rank's slice any more
  return whole.to(local.device());
}

} // namespace

int64_t ShardedTensor::numel() const {
  return c10::multiply_integers(sizes);
}

at::Tensor ShardedTensor::full_tensor() const {
  const auto& param = param_behind(local);
  param.unit().before_shard_read();
  return put_together(param, local.detach(), "full_tensor");
}

at::Tensor ShardedTensor::full_grad() const {
  const auto& param = param_behind(local);
  const at::Tensor gradient = grad();
  return gradient.defined() ? put_together(param, gradient.detach(), "full_grad") : at::Tensor();
}

at::Tensor ShardedTensor::grad() const {
  return param_behind(local).shard_gradient();
}

bool is_sharded(const at::Tensor& tensor) {
  return engine::param_of(tensor) != nullptr && !engine::is_handle(tensor);
}

ShardedTensor sharded(const at::Tensor& shard) {
  const auto& param = param_behind(shard);
  const Mesh& mesh = param.bucket().options().mesh;
  std::vector<Placement> placements(mesh.ndim());
  placements.back().shard_dim = param.layout().dim();
  return {param.shard(), param.name(), param.layout().sizes(), param.layout().strides(), mesh, placements};
}

} // namespace fsdp
