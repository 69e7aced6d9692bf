#include "state/gathered_pieces.h"

#include <algorithm>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>

#include "base/check.h"
#include "engine/internal_scope.h"
#include "state/first_rank.h"
#include "state/optim_outline.h"

namespace fsdp::state {

namespace {

using ShardedState = ShardedOptimStateDict::ParamState;

// An optimizer that keeps a state of every parameter has one where the rank has no element: it is never updated.
bool tells_something(const ShardedState& state) {
  return state.tensors.empty() || std::any_of(state.tensors.begin(), state.tensors.end(), [](const auto& item) {
           const HeldTensor& piece = item.second;
           return piece.local.numel() > 0 || c10::multiply_integers(piece.sizes) == 0;
         });
}

OptimStateDict outline_of(const ShardedOptimStateDict& pieces) {
  OptimStateDict outline;
  for (const auto& item : pieces.state) {
    if (!tells_something(item.value())) {
      continue;
    }
    OptimStateDict::ParamState state{.scalars = item.value().scalars};
    for (const auto& [key, piece] : item.value().tensors) {
      const auto options = at::TensorOptions().dtype(piece.dtype()).device(c10::kMeta);
      state.tensors[key] = at::empty_strided(piece.sizes, piece.strides, options);
    }
    outline.state.insert(item.key(), std::move(state));
  }
  for (const auto& group : pieces.param_groups) {
    outline.param_groups.push_back({group.params, group.options});
  }
  return outline;
}

} // namespace

GatheredPieces::GatheredPieces(const OptimizerOfModel& here, const ShardedOptimStateDict& mine)
    : mine_(mine),
      label_{here.operation, ""},
      is_first_(is_first_rank(here.tensors)),
      mesh_(mesh_of(here.tensors, here.operation)),
      outline_(outline_of(mine)) {
  const engine::InternalScope scope;
  agree_on_outline();
  check_complete();
}

const HeldTensor* GatheredPieces::mine(const std::string& name, const std::string& key) const {
  const auto* state = mine_.state.find(name);
  if (state == nullptr) {
    return nullptr;
  }
  const auto found = state->tensors.find(key);
  return found == state->tensors.end() ? nullptr : &found->second;
}

bool GatheredPieces::gives(const HeldTensor& piece) const {
  return !mesh_ || (piece.mesh ? piece.first_replica : is_first_);
}

void GatheredPieces::agree_on_outline() {
  for (int dim = mesh_ ? mesh_->ndim() - 1 : -1; dim >= 0; --dim) {
    std::vector<OptimStateDict> of_ranks;
    for (const auto& text : mesh_->group(dim)->exchange(encode(outline_), label_)) {
      of_ranks.push_back(decode(text));
    }
    outline_.state = merge(of_ranks, label_.operation).state;
  }
}

void GatheredPieces::check_complete() const {
  std::vector<int64_t> given;
  for (const auto& item : outline_.state) {
    for (const auto& [key, like] : item.value().tensors) {
      const HeldTensor* piece = mine(item.key(), key);
      given.push_back(piece != nullptr && gives(*piece) ? piece->local.numel() : 0);
    }
  }
  const at::Tensor counts = at::tensor(given, at::kLong);
  const at::Tensor on_device = mesh_ ? counts.to(mesh_->device()) : counts;
  sum_over_ranks(on_device);
  const at::Tensor sums = on_device.cpu();
  size_t index = 0;
  for (const auto& item : outline_.state) {
    for (const auto& [key, like] : item.value().tensors) {
      const int64_t sum = sums.const_data_ptr<int64_t>()[index++];
      FSDP_CHECK(
          sum == like.numel(),
          "[{}] the ranks of {} have {} of the {} elements of '{}' of '{}': give the pieces of a sharding over the "
          "same ranks, or take a full_optim_state_dict, which goes into any",
          label_.operation,
          mesh_ ? mesh_->str() : "a model that is not sharded",
          sum,
          like.numel(),
          key,
          item.key());
    }
  }
}

void GatheredPieces::sum_over_ranks(const at::Tensor& numbers) const {
  for (int dim = mesh_ ? mesh_->ndim() - 1 : -1; dim >= 0; --dim) {
    mesh_->group(dim)->all_reduce(numbers, ReduceOp::kSum, /*divide_by=*/1, label_)->wait();
  }
}

// Each element comes from one rank, and zeros from the others: sums of their bytes keep all bits.
at::Tensor GatheredPieces::whole(const std::string& name, const std::string& key, const at::Tensor& like) const {
  const engine::InternalScope scope;
  const HeldTensor* piece = mine(name, key);
  const auto device = mesh_ ? mesh_->device() : piece->local.device();
  const at::Tensor whole = at::empty_strided(like.sizes(), like.strides(), like.options().device(device)).zero_();
  if (piece != nullptr && gives(*piece)) {
    const Extent all = Extent::one_run(0, whole.numel());
    whole.copy_(layout::taken_from(as_piece(*piece), {whole.sizes(), whole.strides(), all, whole}));
  }
  sum_over_ranks(whole.as_strided({whole.numel()}, {1}).view(c10::kByte));
  return whole;
}

} // namespace fsdp::state
