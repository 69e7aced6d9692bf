#include <ATen/core/grad_mode.h>

#include <fsdp/optim_state_dict.h>

#include "engine/internal_scope.h"
#include "state/make_optim_state.h"
#include "state/optim_comparison.h"
#include "state/optim_pieces.h"

namespace fsdp {

namespace {

using state::NamedTensor;
using state::OptimizerByName;

constexpr const char* kLoad = "load_optim_state_dict";

at::Tensor piece_of(const HeldTensor& there, const NamedTensor& param) {
  HeldTensor here = held(param.leaf());
  here.local = here.local.detach();
  return layout::taken_from(state::as_piece(there), state::as_piece(here));
}

/// Of pieces that fit. `may_keep`: tensors of `dict`.
state::MadeState make_of_pieces(
    const state::OptimizerOfModel& here,
    torch::optim::Optimizer& optimizer,
    const ShardedOptimStateDict& dict,
    bool may_keep) {
  const c10::NoGradGuard no_grad;
  const engine::InternalScope scope;
  state::NewState wanted;
  for (const auto& item : dict.state) {
    const NamedTensor& param = *here.by_name.find(item.key());
    auto& [named, state] =
        wanted.params.emplace_back(&param, OptimStateDict::ParamState{.scalars = item.value().scalars});
    for (const auto& [key, there] : item.value().tensors) {
      const at::Tensor piece = piece_of(there, param);
      state.tensors[key] = may_keep && state::is_like_leaf(piece, param) ? piece : state::like_leaf(piece, param);
    }
  }
  for (const auto& group : dict.param_groups) {
    wanted.options.push_back(group.options);
  }
  return {optimizer, here.by_name, wanted};
}

} // namespace

state::MadeState state::make_optim_state(
    ModuleRef module, torch::optim::Optimizer& optimizer, ShardedOptimStateDict&& dict) {
  const OptimizerOfModel here(module, optimizer, kLoad);
  check_optim_state(here, dict);
  return make_of_pieces(here, optimizer, dict, /*may_keep=*/true);
}

void load_optim_state_dict(ModuleRef module, torch::optim::Optimizer& optimizer, const ShardedOptimStateDict& dict) {
  const state::OptimizerOfModel here(module, optimizer, kLoad);
  state::check_optim_state(here, dict);
  make_of_pieces(here, optimizer, dict, /*may_keep=*/false).give_to_optimizer();
}

void load_optim_state_dict(
    ModuleRef module,
    torch::optim::Optimizer& optimizer,
    const OptimStateDict& dict,
    const LoadOptimStateDictOptions& options) {
  const state::OptimizerOfModel here(module, optimizer, kLoad);
  const auto pieces = options.broadcast_from_rank0 ? pieces_of_first_rank(here, dict) : pieces_of_whole(here, dict);
  make_of_pieces(here, optimizer, pieces, /*may_keep=*/true).give_to_optimizer();
}

} // namespace fsdp
