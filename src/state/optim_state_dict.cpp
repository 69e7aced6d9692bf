#include <fsdp/optim_state_dict.h>

#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include <ATen/ops/zeros.h>

#include "base/check.h"
#include "engine/at_work.h"
#include "engine/bucket.h"
#include "engine/put_together.h"
#include "engine/unit.h"
#include "state/optim_outline.h"
#include "state/optimizer_by_name.h"

namespace fsdp {

namespace {

using state::NamedTensor;
using state::OptimizerByName;
using ParamState = OptimStateDict::ParamState;

constexpr const char* kFull = "full_optim_state_dict";

/// Puts states together, all ranks at once.
class WholeStates {
 public:
  WholeStates(const OptimizerByName& optimizer, const FullStateDictOptions& options, bool wanted)
      : optimizer_(optimizer), options_(options), wanted_(wanted) {}

  void add(engine::Unit& unit) {
    const engine::AtWork at_work(unit.runtime());
    for (const auto& bucket : unit.buckets()) {
      add(unit, *bucket);
    }
  }

  /// Of a parameter that is not sharded.
  void add(const NamedTensor& param) {
    if (auto state = optimizer_.state_of(param); state && wanted_) {
      for (auto& [name, tensor] : state->tensors) {
        tensor =
            tensor.detach().to(target(tensor.device()), tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
      }
      wholes_[&param] = std::move(*state);
    }
  }

  ParamState* find(const NamedTensor& param) {
    const auto found = wholes_.find(&param);
    return found == wholes_.end() ? nullptr : &found->second;
  }

 private:
  c10::Device target(c10::Device device) const {
    return options_.offload_to_cpu ? c10::Device(c10::kCPU) : device;
  }

  // By the names in the unit, which ranks agree on.
  OptimStateDict local_states(const engine::Bucket& bucket) const {
    OptimStateDict local;
    for (const engine::Param* param : bucket.params()) {
      const NamedTensor* named = optimizer_.find(param->shard());
      if (auto state = named != nullptr ? optimizer_.state_of(*named) : std::nullopt) {
        local.state.insert(param->name(), std::move(*state));
      }
    }
    return local;
  }

  static OptimStateDict merged(const OptimStateDict& local, engine::Bucket& bucket, const Label& label) {
    std::vector<OptimStateDict> of_ranks;
    for (const auto& text : bucket.shard_group().exchange(state::encode(local), label)) {
      of_ranks.push_back(state::decode(text));
    }
    OptimStateDict all = state::merge(of_ranks, kFull);
    for (const engine::Param* param : bucket.params()) {
      if (const ParamState* whole = all.state.find(param->name())) {
        check_complete(*param, *whole, of_ranks);
      }
    }
    return all;
  }

  // Else zeros would be put together with what others have.
  static void check_complete(
      const engine::Param& param, const ParamState& whole, const std::vector<OptimStateDict>& of_ranks) {
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
      const ParamState* state = of_ranks[rank].state.find(param.name());
      const bool has_elements = param.layout().cut().length(static_cast<int>(rank)) > 0;
      FSDP_CHECK(
          !has_elements || (state != nullptr && state->tensors.size() == whole.tensors.size()),
          "[{}] rank {} has no state of '{}', of which it has elements and others have a state, or less of it: let all "
          "ranks step alike, and load states on all of them",
          kFull,
          rank,
          param.name());
    }
  }

  void add(engine::Unit& unit, engine::Bucket& bucket) {
    const Label label = unit.label(kFull);
    const OptimStateDict local = local_states(bucket), all = merged(local, bucket, label);
    std::set<std::string> keys;
    for (const auto& item : all.state) {
      for (const auto& [key, tensor] : item.value().tensors) {
        keys.insert(key);
      }
    }
    for (const auto& key : keys) {
      put_together(key, local, all, bucket, label);
    }
    for (const engine::Param* param : bucket.params()) {
      const NamedTensor* named = optimizer_.find(param->shard());
      if (const ParamState* state = all.state.find(param->name()); named != nullptr && state != nullptr && wanted_) {
        wholes_[named].scalars = state->scalars;
      }
    }
  }

  // A rank without state for a parameter, since it has no element of it, takes part.
  static at::Tensor piece(
      const engine::Param& param, const ParamState* local, const std::string& key, c10::ScalarType dtype) {
    if (local != nullptr) {
      if (const auto found = local->tensors.find(key); found != local->tensors.end()) {
        like(held(param.shard()), found->second); // an error if it is not
        return found->second.detach();
      }
    }
    return at::zeros(param.shard().sizes(), at::TensorOptions().dtype(dtype).device(param.shard().device()));
  }

  void put_together(
      const std::string& key,
      const OptimStateDict& local,
      const OptimStateDict& all,
      const engine::Bucket& bucket,
      const Label& label) {
    std::vector<engine::PieceOf> pieces;
    for (const engine::Param* param : bucket.params()) {
      if (const ParamState* state = all.state.find(param->name())) {
        if (const auto found = state->tensors.find(key); found != state->tensors.end()) {
          pieces.push_back({param, piece(*param, local.state.find(param->name()), key, found->second.scalar_type())});
        }
      }
    }
    const auto wholes = engine::put_together(pieces, target(bucket.unit().device()), label);
    for (size_t i = 0; wanted_ && i < pieces.size(); ++i) {
      if (const NamedTensor* named = optimizer_.find(pieces[i].param->shard())) {
        wholes_[named].tensors[key] = wholes[i];
      }
    }
  }

  const OptimizerByName& optimizer_;
  const FullStateDictOptions& options_;
  bool wanted_;
  std::unordered_map<const NamedTensor*, ParamState> wholes_;
};

} // namespace

OptimStateDict full_optim_state_dict(
    ModuleRef module, const torch::optim::Optimizer& optimizer, const FullStateDictOptions& options) {
  const state::OptimizerOfModel here(module, optimizer, kFull);
  const bool wanted = !options.rank0_only || state::is_first_rank(here.tensors);
  WholeStates wholes(here.by_name, options, wanted);
  for (const auto& unit : state::units_of(here.tensors)) {
    wholes.add(*unit);
  }
  OptimStateDict dict;
  for (const NamedTensor* param : here.by_name.params()) {
    if (param->param == nullptr) {
      wholes.add(*param);
    }
    if (ParamState* state = wholes.find(*param)) {
      dict.state.insert(param->name, std::move(*state));
    }
  }
  if (wanted) {
    dict.param_groups = here.by_name.groups();
  }
  return dict;
}

ShardedOptimStateDict sharded_optim_state_dict(ModuleRef module, const torch::optim::Optimizer& optimizer) {
  const state::OptimizerOfModel here(module, optimizer, "sharded_optim_state_dict");
  const bool first_rank = state::is_first_rank(here.tensors);
  ShardedOptimStateDict dict;
  for (const NamedTensor* param : here.by_name.params()) {
    if (auto local = here.by_name.state_of(*param)) {
      ShardedOptimStateDict::ParamState state{.scalars = std::move(local->scalars)};
      for (const auto& [key, tensor] : local->tensors) {
        state.tensors[key] = like(state::held(*param, first_rank), tensor);
      }
      dict.state.insert(param->name, std::move(state));
    }
  }
  for (auto& group : here.by_name.groups()) {
    dict.param_groups.push_back({std::move(group.params), std::move(group.options)});
  }
  return dict;
}

} // namespace fsdp
