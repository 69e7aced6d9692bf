#include "state/optim_comparison.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/format.h"

namespace fsdp::state {

namespace {

using Lines = std::vector<std::string>;
using Names = std::vector<std::string>;

constexpr const char* kDecaysApart = "decoupled_weight_decay"; // of Python's Adam

/// A hyper-parameter of Python's optimizers that says how a step is worked out, or one that schedulers keep there.
bool is_without_effect(const std::string& option) {
  static const std::set<std::string> names{
      "foreach",
      "fused",
      "capturable",
      "differentiable",
      "initial_lr",
      "max_lr",
      "min_lr",
      "swa_lr",
      "max_momentum",
      "base_momentum"};
  return names.contains(option);
}

Names sorted(Names names) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

Names without(const Names& some, const Names& others) {
  Names rest;
  std::set_difference(some.begin(), some.end(), others.begin(), others.end(), std::back_inserter(rest));
  return rest;
}

bool has_all_of(const at::Tensor& /*whole*/, const NamedTensor& /*param*/) {
  return true;
}

bool has_all_of(const HeldTensor& there, const NamedTensor& param) {
  const HeldTensor here = fsdp::held(param.leaf());
  return layout::covers(as_piece(there), as_piece(here));
}

/// What the optimizer's kind of state has.
class KnownFields {
 public:
  explicit KnownFields(const OptimizerKind& kind) : state_(kind.make_state()), fields_(kind.fields_of(*state_)) {}

  const std::vector<NamedField>& all() const {
    return fields_;
  }
  const NamedField* find(const std::string& name) const {
    const auto found =
        std::find_if(fields_.begin(), fields_.end(), [&](const auto& field) { return field.name == name; });
    return found == fields_.end() ? nullptr : &*found;
  }

 private:
  std::unique_ptr<torch::optim::OptimizerParamState> state_;
  std::vector<NamedField> fields_;
};

/// Of an optimizer with what it is to be given.
template <typename Dict>
class Comparison {
 public:
  Comparison(const OptimizerByName& by_name, const Dict& dict, const torch::optim::Optimizer& optimizer)
      : by_name_(by_name), dict_(dict), optimizer_(optimizer) {}

  Lines lines() {
    compare_groups();
    for (const auto& item : dict_.state) {
      if (const NamedTensor* param = by_name_.find(item.key())) {
        compare_names(*param, item.key());
        compare_numbers(*param, item.value().scalars);
        compare_tensors(*param, item.value());
        compare_within_flat(*param, item.value().scalars);
      } else {
        lines_.push_back(phrase("'{}' is no parameter of this optimizer's", item.key()));
      }
    }
    return std::move(lines_);
  }

 private:
  using Values = OptimizerByName::Values;

  /// A tied parameter may go under any of its names, but under one.
  void compare_names(const NamedTensor& param, const std::string& name) {
    const auto [place, is_first] = names_.try_emplace(&param, name);
    if (!is_first) {
      lines_.push_back(phrase("'{}' and '{}' are one parameter here: give one state of it", place->second, name));
    }
  }

  void compare_groups() {
    const auto groups = by_name_.groups();
    if (groups.size() != dict_.param_groups.size()) {
      lines_.push_back(phrase("groups of parameters: {} here and {} there", groups.size(), dict_.param_groups.size()));
      if (dict_.param_groups.empty() && dict_.state.is_empty()) {
        lines_.emplace_back(
            "nothing is there: if only the first rank has it, load it with broadcast_from_rank0, or call "
            "scatter_full_optim_state_dict on all ranks");
      }
      return;
    }
    for (size_t i = 0; i < groups.size(); ++i) {
      const Names here = sorted(groups[i].params), there = first_names(dict_.param_groups[i].params);
      if (here != there) {
        const auto missing = without(here, there), unexpected = without(there, here);
        lines_.push_back(phrase("group {}, missing: {}; unexpected: {}", i, join(missing), join(unexpected)));
      }
      const auto options = new_options(i);
      compare_unknown(i, *options);
      const auto needed = by_name_.kind().needed_tensors(*options);
      for (const auto& name : here) {
        needed_[name] = needed;
      }
    }
  }

  Names first_names(const Names& params) const {
    Names names;
    for (const auto& name : params) {
      names.push_back(by_name_.first_name(name));
    }
    return sorted(std::move(names));
  }

  /// A group's hyper-parameters as they are going to be.
  std::unique_ptr<torch::optim::OptimizerOptions> new_options(size_t group) {
    auto options = optimizer_.param_groups()[group].options().clone();
    const Values& wanted = dict_.param_groups[group].options;
    for (const auto& field : by_name_.kind().fields_of(*options)) {
      if (const auto found = wanted.find(field.name); found == wanted.end()) {
        continue; // stays as it is
      } else if (fits(field, found->second)) {
        assign(field, found->second);
      } else {
        lines_.push_back(phrase("group {}: '{}' is of another kind ({})", group, field.name, found->second.tagKind()));
      }
    }
    return options;
  }

  /// What the optimizer does not have may be there, but no step may depend on it.
  void compare_unknown(size_t group, torch::optim::OptimizerOptions& options) {
    Values unknown = dict_.param_groups[group].options;
    for (const auto& field : by_name_.kind().fields_of(options)) {
      unknown.erase(field.name);
    }
    for (const auto& [key, value] : unknown) {
      if (key == kDecaysApart) {
        compare_decay(group, options, may_change_steps(value));
      } else if (!is_without_effect(key) && may_change_steps(value)) {
        lines_.push_back(phrase("group {} has '{}', which this optimizer does not know", group, key));
      }
    }
  }

  void compare_decay(size_t group, torch::optim::OptimizerOptions& options, bool is_apart) {
    const auto fields = by_name_.kind().fields_of(options);
    const bool decays = std::any_of(fields.begin(), fields.end(), [](const NamedField& field) {
      return std::string_view(field.name) == "weight_decay" && may_change_steps(value_of(field));
    });
    if (decays && is_apart != by_name_.kind().decays_apart()) {
      lines_.push_back(phrase(
          "group {}: weights decay {}, and here they do not: what Python's Adam has saved goes into Adam, and what its "
          "AdamW has into AdamW",
          group,
          is_apart ? "beside the step there, as AdamW has it" : "through the gradient there, as Adam has it"));
    }
  }

  void compare_numbers(const NamedTensor& param, const Values& numbers) {
    for (const auto& [key, value] : numbers) {
      const NamedField* field = known_.find(key);
      if (field == nullptr || !fits(*field, value)) {
        lines_.push_back(phrase("'{}' of '{}' is no number of this optimizer's", key, param.name));
      }
    }
    for (const auto& field : known_.all()) {
      if (field.tensor() == nullptr && numbers.count(field.name) == 0) {
        lines_.push_back(phrase("'{}' of '{}' is missing", field.name, param.name));
      }
    }
  }

  template <typename State>
  void compare_tensors(const NamedTensor& param, const State& state) {
    for (const auto& [key, value] : state.tensors) {
      const NamedField* field = known_.find(key);
      if (field == nullptr || field->tensor() == nullptr) {
        lines_.push_back(phrase("'{}' of '{}' is no tensor of this optimizer's", key, param.name));
      } else if (sizes_of(value) != param.sizes()) {
        lines_.push_back(
            phrase("'{}' has sizes {} in the model, its '{}' {}", param.name, param.sizes(), key, sizes_of(value)));
      } else if (!has_all_of(value, param)) {
        lines_.push_back(phrase(
            "'{}' is cut in another way: this rank needs elements that were on others (full_optim_state_dict goes into "
            "any sharding, and flatten_sharded_optim_state_dict makes of these pieces those of this one)",
            param.name));
      }
    }
    for (const char* key : needed_[param.name]) {
      if (state.tensors.count(key) == 0) {
        lines_.push_back(phrase("'{}' of '{}' is missing", key, param.name));
      }
    }
  }

  /// Parameters that lie in one flat parameter have one state, so one of each number.
  void compare_within_flat(const NamedTensor& param, const Values& numbers) {
    if (param.flat() == nullptr) {
      return;
    }
    const auto [place, is_first] = of_flat_.try_emplace(param.flat(), &param, &numbers);
    const auto& [other, others] = place->second;
    if (!is_first && *others != numbers) {
      lines_.push_back(phrase(
          "'{}' and '{}' lie in one flat parameter, but differ in 'step' or another number (use_orig_params = true "
          "keeps them apart)",
          other->name,
          param.name));
    }
  }

  const OptimizerByName& by_name_;
  const Dict& dict_;
  const torch::optim::Optimizer& optimizer_;
  const KnownFields known_{by_name_.kind()};
  std::unordered_map<std::string, std::vector<const char*>> needed_{}; // tensors, by parameter
  std::unordered_map<const NamedTensor*, std::string> names_{}; // under which there is a state
  std::map<const engine::FlatShard*, std::pair<const NamedTensor*, const Values*>> of_flat_{};
  Lines lines_{};
};

template <typename Dict>
void check(const OptimizerOfModel& here, const Dict& dict) {
  const Lines lines = Comparison<Dict>(here.by_name, dict, here.optimizer).lines();
  FSDP_CHECK(
      lines.empty(),
      "[{}] the state is another optimizer's, and none was taken:\n{}\nBuild the model and the optimizer from which it "
      "was taken, with the same groups",
      here.operation,
      join(lines, "\n"));
}

} // namespace

void check_optim_state(const OptimizerOfModel& here, const OptimStateDict& dict) {
  check(here, dict);
}

void check_optim_state(const OptimizerOfModel& here, const ShardedOptimStateDict& dict) {
  check(here, dict);
}

} // namespace fsdp::state
