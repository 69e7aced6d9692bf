#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <fsdp/front_end.h>
#include <fsdp/optim_state_dict.h>

#include "engine/internal_scope.h"
#include "state/first_rank.h"
#include "state/make_optim_state.h"
#include "state/optim_comparison.h"
#include "state/optim_outline.h"

namespace fsdp {

namespace {

using state::NamedTensor;
using state::OptimizerByName;

constexpr const char* kLoad = "load_optim_state_dict";

// As a state that the optimizer itself makes.
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

at::Tensor piece_of(const at::Tensor& whole, const NamedTensor& param) {
  const at::Tensor values = whole.detach();
  return param.param != nullptr ? fsdp::piece_of(param.leaf(), values) : values;
}

at::Tensor piece_of(const HeldTensor& there, const NamedTensor& param) {
  HeldTensor here = held(param.leaf());
  here.local = here.local.detach();
  return layout::taken_from(state::as_piece(there), state::as_piece(here));
}

at::Tensor copied_piece(const at::Tensor& whole, const NamedTensor& param) {
  const engine::InternalScope scope;
  return like_leaf(piece_of(whole, param), param);
}

/// `state_for`: in memory of its own, like the leaf.
template <typename Dict, typename StateFor>
state::MadeState make(
    torch::optim::Optimizer& optimizer, const OptimizerByName& by_name, const Dict& dict, const StateFor& state_for) {
  const c10::NoGradGuard no_grad;
  state::NewState wanted;
  for (const auto& item : dict.state) {
    const NamedTensor* param = by_name.find(item.key());
    auto& [named, state] =
        wanted.params.emplace_back(param, OptimStateDict::ParamState{.scalars = item.value().scalars});
    for (const auto& [key, outline] : item.value().tensors) {
      state.tensors[key] = state_for(*param, item.key(), key, outline);
    }
  }
  for (const auto& group : dict.param_groups) {
    wanted.options.push_back(group.options);
  }
  return {optimizer, by_name, wanted};
}

/// `may_keep`: tensors of `dict`.
state::MadeState make_of_pieces(
    ModuleRef module, torch::optim::Optimizer& optimizer, const ShardedOptimStateDict& dict, bool may_keep) {
  const auto tensors = state::named_tensors(module, kLoad);
  const OptimizerByName by_name(tensors, optimizer, kLoad);
  state::check_optim_state(by_name, dict, optimizer);
  return make(
      optimizer, by_name, dict, [&](const NamedTensor& param, const auto&, const auto&, const HeldTensor& there) {
        const engine::InternalScope scope;
        const at::Tensor piece = piece_of(there, param);
        return may_keep && is_like_leaf(piece, param) ? piece : like_leaf(piece, param);
      });
}

const at::Tensor* tensor_in(const OptimStateDict& dict, const std::string& name, const std::string& key) {
  const auto* state = dict.state.find(name);
  if (state == nullptr) {
    return nullptr;
  }
  const auto found = state->tensors.find(key);
  return found == state->tensors.end() ? nullptr : &found->second;
}

} // namespace

void load_optim_state_dict(
    ModuleRef module,
    torch::optim::Optimizer& optimizer,
    const OptimStateDict& dict,
    const LoadOptimStateDictOptions& options) {
  const auto tensors = state::named_tensors(module, kLoad);
  const OptimizerByName by_name(tensors, optimizer, kLoad);
  if (!options.broadcast_from_rank0) {
    state::check_optim_state(by_name, dict, optimizer);
    make(optimizer, by_name, dict, [](const NamedTensor& param, const auto&, const auto&, const at::Tensor& whole) {
      return copied_piece(whole, param);
    }).give_to_optimizer();
    return;
  }
  const state::FromFirstRank first(tensors, kLoad);
  const OptimStateDict outline = state::decode(first.text(state::encode(dict)));
  state::check_optim_state(by_name, outline, optimizer);
  make(
      optimizer,
      by_name,
      outline,
      [&](const NamedTensor& param, const auto& name, const auto& key, const at::Tensor& like) {
        return copied_piece(first.values(like.sizes(), like.scalar_type(), tensor_in(dict, name, key)), param);
      })
      .give_to_optimizer();
}

state::MadeState state::make_optim_state(
    ModuleRef module, torch::optim::Optimizer& optimizer, ShardedOptimStateDict&& dict) {
  return make_of_pieces(module, optimizer, dict, /*may_keep=*/true);
}

void load_optim_state_dict(ModuleRef module, torch::optim::Optimizer& optimizer, const ShardedOptimStateDict& dict) {
  make_of_pieces(module, optimizer, dict, /*may_keep=*/false).give_to_optimizer();
}

} // namespace fsdp
