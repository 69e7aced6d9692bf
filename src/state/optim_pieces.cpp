#include "state/optim_pieces.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <fsdp/front_end.h>

#include "engine/internal_scope.h"
#include "state/all_ranks.h"
#include "state/comparison.h"
#include "state/first_rank.h"
#include "state/gathered_pieces.h"
#include "state/optim_comparison.h"
#include "state/optim_outline.h"

namespace fsdp::state {

namespace {

at::Tensor piece_of(const at::Tensor& whole, const NamedTensor& param) {
  const at::Tensor values = whole.detach();
  return param.param != nullptr ? fsdp::piece_of(param.leaf(), values) : values;
}

OptimizerByName::Values numbers_of(const OptimizerByName::Values& values) {
  OptimizerByName::Values numbers;
  for (const auto& [key, value] : values) {
    numbers[key] = value.isTensor() && value.toTensor().numel() == 1 ? c10::IValue(value.toTensor().item()) : value;
  }
  return numbers;
}

void check_all_have_values(const OptimStateDict& dict, const char* operation) {
  for (const auto& item : dict.state) {
    for (const auto& [key, tensor] : item.value().tensors) {
      if (tensor.defined()) {
        check_has_values(tensor, key, item.key(), operation);
      }
    }
  }
}

/// `whole_of`, asked for each tensor of `outline`: the whole, which may go once its piece is copied.
template <typename WholeOf>
ShardedOptimStateDict pieces(const OptimizerOfModel& here, const OptimStateDict& outline, const WholeOf& whole_of) {
  const c10::NoGradGuard no_grad;
  const bool first_rank = is_first_rank(here.tensors);
  ShardedOptimStateDict dict;
  for (const auto& item : outline.state) {
    const NamedTensor& param = *here.by_name.find(item.key());
    ShardedOptimStateDict::ParamState state{.scalars = numbers_of(item.value().scalars)};
    for (const auto& [key, tensor] : item.value().tensors) {
      const at::Tensor whole = whole_of(item.key(), key, tensor);
      const engine::InternalScope scope;
      state.tensors[key] = like(held(param, first_rank), like_leaf(piece_of(whole, param), param));
    }
    dict.state.insert(param.name, std::move(state));
  }
  for (const auto& group : outline.param_groups) {
    dict.param_groups.push_back({group.params, numbers_of(group.options)});
  }
  return dict;
}

} // namespace

at::Tensor like_leaf(const at::Tensor& piece, const NamedTensor& param) {
  const auto options = param.leaf().options();
  at::Tensor state = at::empty_strided(
      param.leaf().sizes(),
      param.leaf().strides(),
      at::TensorOptions().dtype(options.dtype()).device(options.device()));
  return state.copy_(piece);
}

bool is_like_leaf(const at::Tensor& piece, const NamedTensor& param) {
  const at::Tensor& leaf = param.leaf();
  return piece.sizes() == leaf.sizes() && piece.strides() == leaf.strides() && piece.dtype() == leaf.dtype() &&
         piece.device() == leaf.device();
}

ShardedOptimStateDict pieces_of_whole(const OptimizerOfModel& here, const OptimStateDict& state) {
  check_optim_state(here, state);
  return pieces(here, state, [](const auto&, const auto&, const at::Tensor& whole) { return whole; });
}

ShardedOptimStateDict pieces_of_first_rank(const OptimizerOfModel& here, const OptimStateDict& state) {
  const FromFirstRank first(here.tensors, here.operation);
  const auto outline_here = [&] {
    check_all_have_values(state, here.operation);
    return encode(state);
  };
  const OptimStateDict outline = decode(text_in(first.text(first.is_first() ? text_or_reason(outline_here) : "")));
  check_on_all_ranks(first.mesh(), {here.operation, ""}, [&] {
    check_optim_state(here, outline); // what is not sharded may have other sizes here
  });
  return pieces(here, outline, [&](const auto& name, const auto& key, const at::Tensor& like) {
    return first.values(like.sizes(), like.scalar_type(), tensor_in(state, name, key));
  });
}

ShardedOptimStateDict pieces_of_all_ranks(const OptimizerOfModel& here, const ShardedOptimStateDict& state) {
  const GatheredPieces all(here, state);
  return pieces(here, all.outline(), [&](const auto& name, const auto& key, const at::Tensor& like) {
    return all.whole(name, key, like);
  });
}

} // namespace fsdp::state
