#include "state/gathered_pieces.h"

#include <algorithm>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <c10/util/accumulate.h>

#include "base/check.h"
#include "engine/internal_scope.h"
#include "state/all_ranks.h"
#include "state/comparison.h"
#include "state/optim_comparison.h"
#include "state/optim_outline.h"

namespace fsdp::state {

namespace {

using ShardedState = ShardedOptimStateDict::ParamState;

// An optimizer that keeps a state of every parameter has one where the rank has no element: it was perhaps never
// updated.
bool tells_something(const ShardedState& state) {
  return state.tensors.empty() || std::any_of(state.tensors.begin(), state.tensors.end(), [](const auto& item) {
           const HeldTensor& piece = item.second;
           return piece.local.numel() > 0 || c10::multiply_integers(piece.sizes) == 0;
         });
}

void check_alike(const OptimStateDict& all, const OptimStateDict& of_rank, const char* operation) {
  for (const auto& item : of_rank.state) {
    const auto* known = all.state.find(item.key());
    for (const auto& [key, tensor] : item.value().tensors) {
      const auto found = known != nullptr ? known->tensors.find(key) : item.value().tensors.end();
      FSDP_CHECK(
          known == nullptr || found == known->tensors.end() ||
              (found->second.sizes() == tensor.sizes() && found->second.strides() == tensor.strides()),
          "[{}] '{}' of '{}' has sizes {} and strides {} on one rank, {} and {} on another: give pieces of one model",
          operation,
          key,
          item.key(),
          found->second.sizes(),
          found->second.strides(),
          tensor.sizes(),
          tensor.strides());
    }
  }
}

/// The sum of elements' indices in the whole tells, beside their number, whether each is there once; modulo 2^64.
uint64_t sum_of_indices(const Extent& extent) {
  const auto first = static_cast<uint64_t>(extent.first), run = static_cast<uint64_t>(extent.run);
  const auto stride = static_cast<uint64_t>(extent.stride);
  uint64_t sum = 0;
  for (uint64_t i = 0; i < static_cast<uint64_t>(extent.count); ++i) {
    sum += run * (first + i * stride);
  }
  const uint64_t within = run % 2 == 0 ? run / 2 * (run - 1) : (run - 1) / 2 * run; // of one run
  return sum + static_cast<uint64_t>(extent.count) * within;
}

struct Elements {
  uint64_t count = 0, indices = 0;
  bool operator==(const Elements&) const = default;
};

Elements elements_of(const Extent& extent) {
  return {static_cast<uint64_t>(extent.numel()), sum_of_indices(extent)};
}

/// Numbers whose sums are exact, whatever the bits mean: as wide as possible, since few backends sum bytes.
c10::ScalarType integers_of(const at::Tensor& tensor) {
  return tensor.nbytes() % sizeof(int32_t) == 0 ? c10::kInt : c10::kByte;
}

} // namespace

GatheredPieces::GatheredPieces(const OptimizerOfModel& here, const ShardedOptimStateDict& mine)
    : here_(here),
      mine_(mine),
      label_{here.operation, ""},
      is_first_(is_first_rank(here.tensors)),
      mesh_(mesh_of(here.tensors, here.operation)) {
  const engine::InternalScope scope;
  for (const auto& item : mine_.state) {
    if (is_own(item.key(), item.value())) {
      own_.insert(item.key());
    }
  }
  agree_on_outline();
  check_complete();
  add_own_and_check();
}

bool GatheredPieces::is_own(const std::string& name, const ShardedState& state) const {
  const NamedTensor* param = here_.by_name.find(name);
  return param != nullptr && param->param == nullptr &&
         std::none_of(state.tensors.begin(), state.tensors.end(), [](const auto& item) { return item.second.mesh; });
}

bool GatheredPieces::gives(const HeldTensor& piece) const {
  return !mesh_ || (piece.mesh ? piece.first_replica : is_first_);
}

// Of what this rank is going to give.
void GatheredPieces::check_values() const {
  for (const auto& item : mine_.state) {
    for (const auto& [key, piece] : item.value().tensors) {
      const bool own = own_.count(item.key()) != 0;
      if (!own && !gives(piece)) {
        continue;
      }
      const auto wanted = own ? c10::multiply_integers(piece.sizes) : piece.extent.numel();
      FSDP_CHECK(
          piece.local.numel() == wanted,
          "[{}] '{}' of '{}' has {} elements where its place has {}: change the values of a piece, not its sizes",
          label_.operation,
          key,
          item.key(),
          piece.local.numel(),
          wanted);
      if (own || wanted > 0) {
        check_has_values(piece.local, key, item.key(), label_.operation);
      }
    }
  }
}

OptimStateDict GatheredPieces::outline_of(const ShardedOptimStateDict& pieces, bool own) const {
  OptimStateDict outline;
  for (const auto& item : pieces.state) {
    if ((own_.count(item.key()) != 0) != own || (mesh_ && !tells_something(item.value()))) {
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

void GatheredPieces::agree_on_outline() {
  const auto outline_here = [this] {
    check_values();
    return encode(outline_of(mine_, /*own=*/false));
  };
  for (const auto& told : from_all_ranks(mesh_, text_or_reason(outline_here), label_)) {
    OptimStateDict of_rank = decode(text_in(told));
    auto groups = std::move(outline_.param_groups.empty() ? of_rank.param_groups : outline_.param_groups);
    check_alike(outline_, of_rank, label_.operation);
    outline_ = merge({std::move(outline_), std::move(of_rank)}, label_.operation);
    outline_.param_groups = std::move(groups);
  }
}

// What is a rank's own may be wrong on that rank alone, but no rank is to wait for it.
void GatheredPieces::add_own_and_check() {
  check_on_all_ranks(mesh_, label_, [this] {
    for (auto& item : outline_of(mine_, /*own=*/true).state) {
      outline_.state.insert(item.key(), std::move(item.value()));
    }
    check_optim_state(here_, outline_);
  });
}

void GatheredPieces::check_complete() const {
  std::vector<int64_t> given;
  for (const auto& item : outline_.state) {
    for (const auto& [key, like] : item.value().tensors) {
      const HeldTensor* piece = tensor_in(mine_, item.key(), key);
      const Elements elements = piece != nullptr && gives(*piece) ? elements_of(piece->extent) : Elements();
      given.push_back(static_cast<int64_t>(elements.count));
      given.push_back(static_cast<int64_t>(elements.indices));
    }
  }
  if (given.empty()) {
    return;
  }
  const at::Tensor numbers = at::tensor(given, at::kLong);
  const at::Tensor on_device = mesh_ ? numbers.to(mesh_->device()) : numbers;
  sum_over_ranks(on_device);
  const at::Tensor sums = on_device.cpu();
  const auto* sum = sums.const_data_ptr<int64_t>();
  for (const auto& item : outline_.state) {
    for (const auto& [key, like] : item.value().tensors) {
      const Elements there{static_cast<uint64_t>(sum[0]), static_cast<uint64_t>(sum[1])};
      FSDP_CHECK(
          there == elements_of(Extent::one_run(0, like.numel())),
          "[{}] of '{}' of '{}' the ranks of {} have {} elements where each of {} is needed once: give the pieces of "
          "a sharding over the same ranks, each rank its own, or take a full_optim_state_dict, which goes into any",
          label_.operation,
          key,
          item.key(),
          mesh_ ? mesh_->str() : "a model that is not sharded",
          there.count,
          like.numel());
      sum += 2;
    }
  }
}

void GatheredPieces::sum_over_ranks(const at::Tensor& numbers) const {
  for (int dim = mesh_ ? mesh_->ndim() - 1 : -1; dim >= 0; --dim) {
    mesh_->group(dim)->all_reduce(numbers, ReduceOp::kSum, /*divide_by=*/1, label_)->wait();
  }
}

// Each element comes from one rank, and zeros from the others: sums of what their bits are as integers keep them.
at::Tensor GatheredPieces::whole(const std::string& name, const std::string& key, const at::Tensor& like) const {
  const HeldTensor* piece = tensor_in(mine_, name, key);
  if (own_.count(name) != 0) {
    return piece->local;
  }
  const engine::InternalScope scope;
  const auto device = mesh_ ? mesh_->device() : piece->local.device();
  const at::Tensor whole = at::empty_strided(like.sizes(), like.strides(), like.options().device(device)).zero_();
  if (piece != nullptr && gives(*piece) && piece->local.numel() > 0) {
    const Extent& extent = piece->extent;
    whole.as_strided({extent.count, extent.run}, {extent.stride, 1}, extent.first)
        .copy_(layout::in_memory_order(as_piece(*piece)).reshape({extent.count, extent.run}));
  }
  if (whole.numel() > 0) {
    sum_over_ranks(whole.as_strided({whole.numel()}, {1}).view(integers_of(whole)));
  }
  return whole;
}

} // namespace fsdp::state
