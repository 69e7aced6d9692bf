#include <fsdp/optim_state_forms.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/check.h"
#include "state/optim_pieces.h"

namespace fsdp {

namespace {

constexpr const char* kRekey = "rekey_optim_state_dict";

using Keys = std::vector<std::string>;

Keys keys_of(const OptimStateDict& state) {
  Keys keys = state.state.keys();
  for (const auto& group : state.param_groups) {
    keys.insert(keys.end(), group.params.begin(), group.params.end());
  }
  return keys;
}

/// The parameters of an optimizer by name and by number.
class Numbering {
 public:
  explicit Numbering(const state::OptimizerByName& optimizer) : optimizer_(optimizer) {
    for (const auto& group : optimizer.groups()) {
      for (const auto& name : group.params) {
        const std::string id = std::to_string(ids_.size());
        ids_[name] = id;
        names_[id] = name;
      }
    }
  }

  /// Numbers may be names, too: a `ParameterList` has such.
  bool are_numbers(const Keys& keys) const {
    const auto is_number = [&](const auto& key) { return names_.count(key) != 0; };
    const auto is_name = [&](const auto& key) { return optimizer_.find(key) != nullptr; };
    const bool numbers = std::all_of(keys.begin(), keys.end(), is_number);
    const auto no_name = std::find_if_not(keys.begin(), keys.end(), is_name);
    FSDP_CHECK(
        numbers || no_name == keys.end(),
        "[{}] '{}' is no name of a parameter that the optimizer has, and the keys are not all numbers below {}: give "
        "the module and the optimizer whose state it is",
        kRekey,
        *no_name,
        names_.size());
    const bool ambiguous = numbers && no_name == keys.end() &&
                           std::any_of(keys.begin(), keys.end(), [&](const auto& key) { return id_of(key) != key; });
    FSDP_CHECK(
        !ambiguous,
        "[{}] the module's parameters have numbers for names, in another order than the optimizer has them: nobody can "
        "tell what the state goes by",
        kRekey);
    return numbers;
  }

  const std::string& id_of(const std::string& name) const {
    return ids_.at(optimizer_.first_name(name));
  }
  const std::string& name_of(const std::string& id) const {
    return names_.at(id);
  }
  const std::string& first_name(const std::string& name) const {
    return optimizer_.first_name(name);
  }

 private:
  const state::OptimizerByName& optimizer_;
  std::unordered_map<std::string, std::string> ids_; // by name, counted in the optimizer's order
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
  const Numbering numbering(here.by_name);
  const bool are_numbers = numbering.are_numbers(keys_of(state));
  const auto rekeyed = [&](const std::string& key) {
    const std::string& name = are_numbers ? numbering.name_of(key) : numbering.first_name(key);
    return key_type == OptimStateKeyType::kParamName ? name : numbering.id_of(name);
  };
  OptimStateDict result;
  for (const auto& item : state.state) {
    const std::string key = rekeyed(item.key());
    FSDP_CHECK(
        !result.state.contains(key),
        "[{}] '{}' and another key are names of one parameter: give one state of it",
        kRekey,
        item.key());
    result.state.insert(key, item.value());
  }
  for (const auto& group : state.param_groups) {
    auto& params = result.param_groups.emplace_back(OptimStateDict::ParamGroup{{}, group.options}).params;
    std::transform(group.params.begin(), group.params.end(), std::back_inserter(params), rekeyed);
  }
  return result;
}

} // namespace fsdp
