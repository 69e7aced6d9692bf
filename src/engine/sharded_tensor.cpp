#include <fsdp/sharded_tensor.h>

#include "base/check.h"
#include "engine/bucket.h"
#include "engine/put_together.h"
#include "engine/tenant.h"
#include "engine/unit.h"

namespace fsdp {

namespace {

const engine::Param& param_behind(const at::Tensor& shard) {
  const engine::Param* param = engine::param_of(shard);
  FSDP_CHECK(
      param != nullptr && !engine::is_handle(shard),
      "[sharded] a parameter's shard is needed, as model->parameters() gives it after fully_shard; this is {}",
      param != nullptr ? "the handle of '" + param->name() + "'" : std::string("another tensor"));
  return *param;
}

at::Tensor put_together(const engine::Param& param, const at::Tensor& local, const char* operation) {
  return engine::put_together({{&param, local}}, local.device(), {operation, param.name()})[0];
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
