// Initializers that go over `parameters()` (as `reset_parameters` of LibTorch's recurrent modules does) fill shards
// with random numbers. Each rank draws those of the whole and keeps its piece: with the same seed everywhere they are
// those of a model that is not sharded, where each shard's own would repeat the first rank's.

#include <array>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include "engine/flat_bucket.h"
#include "engine/internal_scope.h"
#include "engine/interposer.h"
#include "engine/param.h"
#include "engine/recording.h"
#include "engine/tenant.h"

namespace fsdp::engine {

namespace {

/// The parameter of a shard, or of a view of all of it (`shard.data()`), that is not the whole.
const Param* param_of_piece(const at::Tensor& tensor) {
  const Param* param = is_handle(tensor) ? nullptr : param_of(tensor);
  const bool is_all = param != nullptr && tensor.sizes() == param->shard().sizes() &&
                      tensor.strides() == param->shard().strides() && tensor.scalar_type() == param->shard_dtype();
  return is_all && tensor.sizes() != c10::IntArrayRef(param->layout().sizes()) ? param : nullptr;
}

/// The same of a flat shard.
const FlatShard* flat_of_piece(const at::Tensor& tensor) {
  const FlatShard* flat = flat_shard_of(tensor);
  const bool is_all = flat != nullptr && tensor.sizes() == flat->tensor().sizes() &&
                      tensor.scalar_type() == flat->tensor().scalar_type();
  return is_all && flat->bucket().shard_group().size() > 1 ? flat : nullptr;
}

/// In place of a parameter's shard, or of a flat one.
at::Tensor whole_for(const at::Tensor& shard, const Param* param, const FlatShard* flat) {
  const auto options = shard.options().requires_grad(false);
  return param != nullptr ? at::empty_strided(param->layout().sizes(), param->layout().strides(), options)
                          : at::empty({shard.numel() * flat->bucket().shard_group().size()}, options);
}

void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  c10::IValue& argument = torch::jit::peek(*stack, 0, op.schema().arguments().size());
  const at::Tensor shard = argument.toTensor();
  const Param* param = param_of_piece(shard);
  const FlatShard* flat = param == nullptr ? flat_of_piece(shard) : nullptr;
  if (param == nullptr && flat == nullptr) {
    intercept(op, keys, stack);
    return;
  }
  const Recording::Pause pause; // of `deferred_init`, if one of its modules is sharded already
  argument = whole_for(shard, param, flat);
  op.callBoxed(stack);
  at::Tensor piece;
  {
    const InternalScope scope;
    const at::Tensor drawn = stack->back().toTensor();
    piece = param != nullptr ? param->piece_of(drawn) : flat->share_of(drawn);
  }
  shard.copy_(piece); // seen as any write is
  stack->back() = shard;
}

// Of what a DTensor wraps. On other devices than the CPU DTensor sees to the numbers itself.
void draw_inside(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const at::Tensor& shard = torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor();
  shard.is_cpu() && param_of_piece(shard) != nullptr ? draw(op, keys, stack) : intercept_inside(op, keys, stack);
}

constexpr std::array kNames{
    "uniform_",
    "normal_",
    "random_",
    "random_.from",
    "random_.to",
    "bernoulli_.float",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_"};

} // namespace

} // namespace fsdp::engine

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  for (const char* name : fsdp::engine::kNames) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fsdp::engine::draw>());
  }
}

TORCH_LIBRARY_IMPL(aten, CustomRNGKeyId, library) {
  for (const char* name : fsdp::engine::kNames) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fsdp::engine::draw_inside>());
  }
}
