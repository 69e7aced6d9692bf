#include "state/optimizer_by_name.h"

#include <ATen/ops/zeros.h>

#include "base/check.h"
#include "engine/tenant.h"

namespace fsdp::state {

OptimizerByName::OptimizerByName(
    const std::vector<NamedTensor>& tensors, const torch::optim::Optimizer& optimizer, const char* operation)
    : optimizer_(optimizer), kind_(kind_of(optimizer, operation)) {
  add_names(tensors);
  for (const auto& group : optimizer.param_groups()) {
    check_params(group, operation);
  }
  add_params(tensors);
}

void OptimizerByName::add_names(const std::vector<NamedTensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.is_buffer) {
      continue;
    }
    const auto [place, is_first] = by_leaf_.emplace(tensor.leaf().unsafeGetTensorImpl(), &tensor);
    by_name_[tensor.name] = place->second;
    if (is_first) {
      by_trained_[tensor.trained().unsafeGetTensorImpl()].push_back(&tensor);
    }
  }
}

void OptimizerByName::check_params(const torch::optim::OptimizerParamGroup& group, const char* operation) const {
  for (const auto& tensor : group.params()) {
    FSDP_CHECK(
        !engine::is_handle(tensor),
        "[{}] expected an optimizer of shards, but it was given '{}' before that was sharded, and does not train it: "
        "build optimizers after fully_shard, of fsdp::parameters(model)",
        operation,
        engine::param_of(tensor)->name());
    FSDP_CHECK(
        by_trained_.count(tensor.unsafeGetTensorImpl()) != 0,
        "[{}] the optimizer has a parameter of sizes {} that is not the module's: give the module of whose parameters "
        "the optimizer was built",
        operation,
        tensor.sizes());
  }
}

void OptimizerByName::add_params(const std::vector<NamedTensor>& tensors) {
  std::unordered_set<const c10::TensorImpl*> optimized;
  for (const auto& group : optimizer_.param_groups()) {
    for (const auto& tensor : group.params()) {
      optimized.insert(tensor.unsafeGetTensorImpl());
    }
  }
  for (const auto& tensor : tensors) {
    const bool is_first_name = !tensor.is_buffer && by_leaf_.at(tensor.leaf().unsafeGetTensorImpl()) == &tensor;
    if (is_first_name && optimized.count(tensor.trained().unsafeGetTensorImpl()) != 0) {
      params_.push_back(&tensor);
      optimized_.insert(&tensor);
    }
  }
}

const NamedTensor* OptimizerByName::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : find(found->second->leaf());
}

const NamedTensor* OptimizerByName::find(const at::Tensor& leaf) const {
  const auto found = by_leaf_.find(leaf.unsafeGetTensorImpl());
  return found != by_leaf_.end() && optimized_.count(found->second) != 0 ? found->second : nullptr;
}

const std::string& OptimizerByName::first_name(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? name : found->second->name;
}

std::optional<OptimizerByName::ParamState> OptimizerByName::state_of(const NamedTensor& param) const {
  const auto found = optimizer_.state().find(param.trained().unsafeGetTensorImpl());
  if (found == optimizer_.state().end()) {
    return std::nullopt;
  }
  ParamState state;
  for (const auto& field : kind_.fields_of(*found->second)) {
    const at::Tensor* tensor = field.tensor();
    if (tensor == nullptr) {
      state.scalars[field.name] = value_of(field);
    } else if (tensor->defined()) {
      state.tensors[field.name] = param.flat() != nullptr ? param.flat()->part_of(*param.param, *tensor) : *tensor;
    }
  }
  return state;
}

std::vector<OptimizerByName::ParamGroup> OptimizerByName::groups() const {
  std::vector<ParamGroup> groups;
  for (const auto& group : optimizer_.param_groups()) {
    ParamGroup& named = groups.emplace_back();
    std::unordered_set<std::string> seen;
    for (const auto& tensor : group.params()) {
      for (const NamedTensor* param : by_trained_.at(tensor.unsafeGetTensorImpl())) {
        if (seen.insert(param->name).second) {
          named.params.push_back(param->name);
        }
      }
    }
    for (const auto& field : kind_.fields_of(const_cast<torch::optim::OptimizerOptions&>(group.options()))) {
      named.options[field.name] = value_of(field); // only read
    }
  }
  return groups;
}

namespace {

/// The states of parameters that lie in one flat parameter, put together: zeros for one that has none. Scalars are the
/// same for all of them.
class FlatState {
 public:
  explicit FlatState(const engine::FlatShard& flat) : flat_(flat) {}

  void add(const NamedTensor& param, const OptimStateDict::ParamState& state) {
    state_.scalars = state.scalars;
    for (const auto& [key, tensor] : state.tensors) {
      at::Tensor& together = state_.tensors[key];
      if (!together.defined()) {
        const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device());
        together = at::zeros(flat_.tensor().sizes(), options);
      }
      flat_.part_of(*param.param, together).copy_(tensor);
    }
  }
  const OptimStateDict::ParamState& state() const {
    return state_;
  }

 private:
  const engine::FlatShard& flat_;
  OptimStateDict::ParamState state_;
};

std::unique_ptr<torch::optim::OptimizerParamState> make_state(
    const OptimizerKind& kind, const OptimStateDict::ParamState& wanted) {
  auto state = kind.make_state();
  for (const auto& field : kind.fields_of(*state)) {
    if (at::Tensor* place = field.tensor()) {
      const auto found = wanted.tensors.find(field.name);
      *place = found == wanted.tensors.end() ? at::Tensor() : found->second;
    } else if (const auto found = wanted.scalars.find(field.name); found != wanted.scalars.end()) {
      assign(field, found->second);
    }
  }
  return state;
}

void set_options(
    torch::optim::OptimizerOptions& options, const OptimizerKind& kind, const OptimizerByName::Values& wanted) {
  for (const auto& field : kind.fields_of(options)) {
    if (const auto found = wanted.find(field.name); found != wanted.end()) {
      assign(field, found->second);
    }
  }
}

} // namespace

MadeState::MadeState(torch::optim::Optimizer& optimizer, const OptimizerByName& by_name, const NewState& wanted)
    : optimizer_(&optimizer), kind_(&by_name.kind()), options_(wanted.options) {
  if (!kind_->needs_state()) {
    for (const NamedTensor* param : by_name.params()) {
      without_state_.push_back(param->trained().unsafeGetTensorImpl());
    }
  }
  std::map<const engine::FlatShard*, FlatState> of_flat;
  for (const auto& [param, state] : wanted.params) {
    if (const engine::FlatShard* flat = param->flat()) {
      of_flat.try_emplace(flat, *flat).first->second.add(*param, state);
    } else {
      states_.emplace_back(param->leaf().unsafeGetTensorImpl(), make_state(*kind_, state));
    }
  }
  for (const auto& [flat, together] : of_flat) {
    states_.emplace_back(flat->tensor().unsafeGetTensorImpl(), make_state(*kind_, together.state()));
  }
}

void MadeState::give_to_optimizer() {
  auto& states = optimizer_->state();
  for (void* param : without_state_) {
    states.erase(param);
  }
  for (auto& [param, state] : states_) {
    states[param] = std::move(state);
  }
  for (size_t group = 0; group < options_.size(); ++group) {
    set_options(optimizer_->param_groups()[group].options(), *kind_, options_[group]);
  }
}

} // namespace fsdp::state
