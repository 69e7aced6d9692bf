#include <fsdp/sharded_tensor.h>

#include <string>

#include <ATen/ops/zeros.h>

#include "base/check.h"
#include "engine/bucket.h"
#include "engine/flat_bucket.h"
#include "engine/put_together.h"
#include "engine/tenant.h"
#include "engine/unit.h"

namespace fsdp {

namespace {

/// Of a flat shard the first.
const engine::Param& param_behind(const at::Tensor& shard) {
  const engine::Param* param = engine::param_behind_shard(shard);
  const engine::Param* of_handle = engine::param_of(shard);
  FSDP_CHECK(
      param != nullptr,
      "[sharded] a parameter's shard is needed, as model->parameters() gives it after fully_shard; this is {}",
      of_handle != nullptr ? "the handle of '" + of_handle->name() + "'" : std::string("another tensor"));
  return *param;
}

/// The whole flat parameter, of one of whose likes this is the rank's share: padded to the same length on all ranks.
at::Tensor put_flat_together(const engine::FlatShard& flat, const at::Tensor& local, const char* operation) {
  const auto& params = flat.bucket().params();
  std::vector<engine::PieceOf> pieces;
  for (const engine::Param* param : params) {
    pieces.push_back({param, flat.part_of(*param, local)});
  }
  const auto wholes = engine::put_together(pieces, local.device(), {operation, params.front()->name()});
  auto whole = at::zeros({local.numel() * flat.bucket().shard_group().size()}, local.options());
  for (size_t i = 0; i < wholes.size(); ++i) {
    const Cut& cut = params[i]->layout().cut();
    whole.narrow(0, cut.before, cut.numel).copy_(wholes[i].as_strided({cut.numel}, {1}));
  }
  return whole;
}

/// What all ranks have of a shard, or of what is cut as it is.
at::Tensor put_together(const at::Tensor& shard, const at::Tensor& local, const char* operation) {
  if (const auto* flat = engine::flat_shard_of(shard)) {
    return put_flat_together(*flat, local, operation);
  }
  const auto& param = param_behind(shard);
  return engine::put_together({{&param, local}}, local.device(), {operation, param.name()})[0];
}

/// Of the ranks' gradients; none if no rank has one. A rank that has nothing of a parameter, or has dropped its
/// gradient, takes part all the same.
std::optional<c10::ScalarType> dtype_of_any(const at::Tensor& gradient, Group& group, const Label& label) {
  const auto mine = gradient.defined() ? std::to_string(static_cast<int>(gradient.scalar_type())) : "";
  for (const auto& dtype : group.exchange(mine, label)) {
    if (!dtype.empty()) {
      return static_cast<c10::ScalarType>(std::stoi(dtype));
    }
  }
  return std::nullopt;
}

} // namespace

int64_t ShardedTensor::numel() const {
  return c10::multiply_integers(sizes);
}

at::Tensor ShardedTensor::full_tensor() const {
  param_behind(local).unit().before_shard_read();
  return put_together(local, local.detach(), "full_tensor");
}

at::Tensor ShardedTensor::full_grad() const {
  constexpr const char* kOperation = "full_grad";
  const auto* flat = engine::flat_shard_of(local);
  const auto& param = param_behind(local);
  const at::Tensor gradient = flat != nullptr ? flat->gradient() : param.shard_gradient();
  const auto dtype = dtype_of_any(gradient, param.bucket().shard_group(), {kOperation, param.name()});
  if (!dtype) {
    return {};
  }
  const at::Tensor mine = gradient.defined()
                              ? gradient.detach().to(*dtype)
                              : at::zeros(local.sizes(), at::TensorOptions().dtype(*dtype).device(local.device()));
  return put_together(local, mine, kOperation);
}

at::Tensor ShardedTensor::grad() const {
  if (engine::flat_shard_of(local) != nullptr) {
    return local.grad();
  }
  const auto& param = param_behind(local);
  const bool is_seen = param.bucket().flat_shard() == nullptr; // else it is in the flat one's
  return is_seen && param.unit().policy.shows_waiting_gradients ? param.shard().grad() : param.shard_gradient();
}

bool is_sharded(const at::Tensor& tensor) {
  return engine::param_behind_shard(tensor) != nullptr;
}

ShardedTensor sharded(const at::Tensor& shard) {
  const auto* flat = engine::flat_shard_of(shard);
  const auto& param = param_behind(shard);
  const Mesh& mesh = param.bucket().mesh();
  std::vector<Placement> placements(mesh.ndim());
  placements.back().shard_dim = param.layout().dim();
  if (flat != nullptr) {
    const int64_t numel = flat->tensor().numel() * param.bucket().shard_group().size();
    return {flat->tensor(), param.unit().display_name() + "._flat_param", {numel}, {1}, mesh, placements};
  }
  return {param.shard(), param.name(), param.layout().sizes(), param.layout().strides(), mesh, placements};
}

} // namespace fsdp
