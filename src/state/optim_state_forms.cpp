#include <fsdp/optim_state_forms.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "base/check.h"
#include "state/optim_pieces.h"

namespace fsdp {

namespace {

constexpr const char* kRekey = "rekey_optim_state_dict";

/// Parameters' numbers in an optimizer's groups, one after another.
class Keys {
 public:
  Keys(const state::OptimizerByName& optimizer, OptimStateKeyType wanted) : optimizer_(optimizer), wanted_(wanted) {
    for (const auto& group : optimizer.groups()) {
      for (const auto& name : group.params) {
        const std::string id = std::to_string(ids_.size());
        ids_[name] = id;
        names_[id] = name;
      }
    }
  }

  /// Of a name or a number.
  std::string operator()(const std::string& key) const {
    const auto of_number = names_.find(key);
    const bool is_name = optimizer_.find(key) != nullptr;
    FSDP_CHECK(
        is_name || of_number != names_.end(),
        "[{}] '{}' is neither the name of a parameter that the optimizer has nor a number below {}: give the module "
        "and "
        "the optimizer whose state it is",
        kRekey,
        key,
        names_.size());
    const std::string& name = is_name ? optimizer_.first_name(key) : of_number->second;
    return wanted_ == OptimStateKeyType::kParamName ? name : ids_.at(name);
  }

 private:
  const state::OptimizerByName& optimizer_;
  OptimStateKeyType wanted_;
  std::unordered_map<std::string, std::string> ids_; // by name
  std::unordered_map<std::string, std::string> names_; // by number
};

} // namespace

ShardedOptimStateDict shard_full_optim_state_dict(
    ModuleRef module, const torch::optim::Optimizer& optimizer, const OptimStateDict& state) {
  return state::pieces_of_whole({module, optimizer, "shard_full_optim_state_dict"}, state);
}

ShardedOptimStateDict scatter_full_optim_state_dict(
    ModuleRef module, const torch::optim::Optimizer& optimizer, const OptimStateDict& state) {
  return state::pieces_of_first_rank({module, optimizer, "scatter_full_optim_state_dict"}, state);
}

ShardedOptimStateDict flatten_sharded_optim_state_dict(
    ModuleRef module, const torch::optim::Optimizer& optimizer, const ShardedOptimStateDict& state) {
  return state::pieces_of_all_ranks({module, optimizer, "flatten_sharded_optim_state_dict"}, state);
}

OptimStateDict rekey_optim_state_dict(
    ModuleRef module,
    const torch::optim::Optimizer& optimizer,
    const OptimStateDict& state,
    OptimStateKeyType key_type) {
  const state::OptimizerOfModel here(module, optimizer, kRekey);
  const Keys key_of(here.by_name, key_type);
  OptimStateDict rekeyed;
  for (const auto& item : state.state) {
    rekeyed.state.insert(key_of(item.key()), item.value());
  }
  for (const auto& group : state.param_groups) {
    auto& params = rekeyed.param_groups.emplace_back(OptimStateDict::ParamGroup{{}, group.options}).params;
    for (const auto& key : group.params) {
      params.push_back(key_of(key));
    }
  }
  return rekeyed;
}

} // namespace fsdp
