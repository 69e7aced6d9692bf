#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <fsdp/front_end.h>
#include <fsdp/optim_state_dict.h>

#include "base/check.h"
#include "base/format.h"
#include "engine/internal_scope.h"
#include "state/first_rank.h"
#include "state/optim_outline.h"
#include "state/optimizer_by_name.h"

namespace fsdp {

namespace {

using state::NamedTensor;
using state::OptimizerByName;

constexpr const char* kLoad = "load_optim_state_dict";

using Lines = std::vector<std::string>;
using Names = std::vector<std::string>;

Names sorted(Names names) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

Names names_of(const OptimizerByName& optimizer, const Names& params) {
  Names names;
  for (const auto& name : params) {
    names.push_back(optimizer.first_name(name));
  }
  return sorted(std::move(names));
}

Names without(const Names& some, const Names& others) {
  Names rest;
  std::set_difference(some.begin(), some.end(), others.begin(), others.end(), std::back_inserter(rest));
  return rest;
}

template <typename Dict>
void compare_groups(const OptimizerByName& optimizer, const Dict& dict, Lines& lines) {
  const auto groups = optimizer.groups();
  if (groups.size() != dict.param_groups.size()) {
    lines.push_back(phrase("groups of parameters: {} here and {} there", groups.size(), dict.param_groups.size()));
    return;
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    const Names here = sorted(groups[i].params), there = names_of(optimizer, dict.param_groups[i].params);
    if (here != there) {
      const auto missing = without(here, there), unexpected = without(there, here);
      lines.push_back(phrase("group {}, missing: {}; unexpected: {}", i, join(missing), join(unexpected)));
    }
  }
}

bool has_all_of(const at::Tensor& /*whole*/, const NamedTensor& /*param*/) {
  return true;
}

bool has_all_of(const HeldTensor& there, const NamedTensor& param) {
  const HeldTensor here = held(param.leaf());
  return layout::covers(state::as_piece(there), state::as_piece(here));
}

/// What the optimizer's kind of state has.
class KnownFields {
 public:
  explicit KnownFields(const state::OptimizerKind& kind)
      : state_(kind.make_state()), fields_(kind.fields_of(*state_)) {}

  bool has(const std::string& name, bool tensor) const {
    return std::any_of(fields_.begin(), fields_.end(), [&](const auto& field) {
      return field.name == name && (field.tensor() != nullptr) == tensor;
    });
  }

 private:
  std::unique_ptr<torch::optim::OptimizerParamState> state_;
  std::vector<state::NamedField> fields_;
};

template <typename State>
void compare_state(const NamedTensor& param, const State& state, const KnownFields& known, Lines& lines) {
  for (const auto& [key, value] : state.scalars) {
    if (!known.has(key, /*tensor=*/false)) {
      lines.push_back(phrase("'{}' of '{}' is no number of this optimizer's", key, param.name));
    }
  }
  for (const auto& [key, value] : state.tensors) {
    if (!known.has(key, /*tensor=*/true)) {
      lines.push_back(phrase("'{}' of '{}' is no tensor of this optimizer's", key, param.name));
    } else if (state::sizes_of(value) != param.sizes()) {
      lines.push_back(phrase(
          "'{}' has sizes {} in the model, its '{}' {}", param.name, param.sizes(), key, state::sizes_of(value)));
    } else if (!has_all_of(value, param)) {
      lines.push_back(phrase(
          "'{}' is cut in another way: this rank needs elements that were on others (full_optim_state_dict goes into "
          "any sharding)",
          param.name));
    }
  }
}

/// Parameters that lie in one flat parameter have one state, so one of each number.
class OneOfEachNumber {
 public:
  void compare(const NamedTensor& param, const OptimizerByName::Values& scalars, Lines& lines) {
    if (param.flat() == nullptr) {
      return;
    }
    const auto [place, is_first] = of_flat_.try_emplace(param.flat(), &param, &scalars);
    const auto& [other, others] = place->second;
    if (!is_first && *others != scalars) {
      lines.push_back(phrase(
          "'{}' and '{}' lie in one flat parameter, but differ in 'step' or another number (use_orig_params = true "
          "keeps "
          "them apart)",
          other->name,
          param.name));
    }
  }

 private:
  std::map<const engine::FlatShard*, std::pair<const NamedTensor*, const OptimizerByName::Values*>> of_flat_;
};

template <typename Dict>
void check(const OptimizerByName& optimizer, const Dict& dict) {
  Lines lines;
  compare_groups(optimizer, dict, lines);
  const KnownFields known(optimizer.kind());
  OneOfEachNumber numbers;
  for (const auto& item : dict.state) {
    if (const NamedTensor* param = optimizer.find(item.key())) {
      compare_state(*param, item.value(), known, lines);
      numbers.compare(*param, item.value().scalars, lines);
    } else {
      lines.push_back(phrase("'{}' is no parameter of this optimizer's", item.key()));
    }
  }
  FSDP_CHECK(
      lines.empty(),
      "[load_optim_state_dict] the state is another optimizer's, and none was loaded:\n{}\nBuild the model and the "
      "optimizer from which it was taken, with the same groups",
      join(lines, "\n"));
}

// As a state that the optimizer itself makes.
at::Tensor like_leaf(const at::Tensor& piece, const NamedTensor& param) {
  const auto options = param.leaf().options();
  at::Tensor state = at::empty_strided(
      param.leaf().sizes(),
      param.leaf().strides(),
      at::TensorOptions().dtype(options.dtype()).device(options.device()));
  return state.copy_(piece);
}

at::Tensor piece_for(const at::Tensor& whole, const NamedTensor& param) {
  const at::Tensor values = whole.detach();
  return param.param != nullptr ? fsdp::piece_of(param.leaf(), values) : values;
}

at::Tensor piece_for(const HeldTensor& there, const NamedTensor& param) {
  HeldTensor here = held(param.leaf());
  here.local = like_leaf(here.local.detach(), param);
  return layout::taken_from(state::as_piece(there), state::as_piece(here));
}

template <typename Dict, typename Find>
void load(torch::optim::Optimizer& optimizer, const OptimizerByName& by_name, const Dict& dict, const Find& value_for) {
  const c10::NoGradGuard no_grad;
  state::NewState wanted;
  for (const auto& item : dict.state) {
    const NamedTensor* param = by_name.find(item.key());
    auto& [named, state] =
        wanted.params.emplace_back(param, OptimStateDict::ParamState{.scalars = item.value().scalars});
    for (const auto& [key, outline] : item.value().tensors) {
      const auto value = value_for(item.key(), key, outline);
      const engine::InternalScope scope;
      state.tensors[key] = like_leaf(piece_for(value, *param), *param);
    }
  }
  for (const auto& group : dict.param_groups) {
    wanted.options.push_back(group.options);
  }
  replace_state(optimizer, by_name, wanted);
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
    check(by_name, dict);
    load(optimizer, by_name, dict, [](const auto&, const auto&, const at::Tensor& whole) { return whole; });
    return;
  }
  const state::FromFirstRank first(tensors, kLoad);
  const OptimStateDict outline = state::decode(first.text(state::encode(dict)));
  check(by_name, outline);
  load(optimizer, by_name, outline, [&](const auto& name, const auto& key, const at::Tensor& like) {
    return first.values(like.sizes(), like.scalar_type(), tensor_in(dict, name, key));
  });
}

void load_optim_state_dict(ModuleRef module, torch::optim::Optimizer& optimizer, const ShardedOptimStateDict& dict) {
  const auto tensors = state::named_tensors(module, kLoad);
  const OptimizerByName by_name(tensors, optimizer, kLoad);
  check(by_name, dict);
  load(optimizer, by_name, dict, [](const auto&, const auto&, const HeldTensor& there) { return there; });
}

} // namespace fsdp
