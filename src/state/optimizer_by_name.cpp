#include "state/optimizer_by_name.h"

#include "base/check.h"
#include "engine/flat_shard.h"
#include "engine/tenant.h"

namespace fsdp::state {

OptimizerByName::OptimizerByName(
    const std::vector<NamedTensor>& tensors, const torch::optim::Optimizer& optimizer, const char* operation)
    : optimizer_(optimizer), kind_(kind_of(optimizer, operation)) {
  for (const auto& tensor : tensors) {
    if (!tensor.is_buffer) {
      const auto first = by_leaf_.emplace(tensor.leaf().unsafeGetTensorImpl(), &tensor).first;
      by_name_[tensor.name] = first->second;
    }
  }
  for (const auto& group : optimizer.param_groups()) {
    check_params(group, operation);
  }
  add_params(tensors);
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
        engine::flat_shard_of(tensor) == nullptr,
        "[{}] the optimizer was given flat parameters, whose states have no parameters' names: build the model with "
        "use_orig_params = true where optimizers' states are to be saved",
        operation);
    FSDP_CHECK(
        by_leaf_.count(tensor.unsafeGetTensorImpl()) != 0,
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
    if (!tensor.is_buffer && optimized.erase(tensor.leaf().unsafeGetTensorImpl()) != 0) {
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
  const auto found = optimizer_.state().find(param.leaf().unsafeGetTensorImpl());
  if (found == optimizer_.state().end()) {
    return std::nullopt;
  }
  ParamState state;
  for (const auto& field : kind_.fields_of(*found->second)) {
    const at::Tensor* tensor = field.tensor();
    if (tensor == nullptr) {
      state.scalars[field.name] = value_of(field);
    } else if (tensor->defined()) {
      state.tensors[field.name] = *tensor;
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
      const std::string& name = by_leaf_.at(tensor.unsafeGetTensorImpl())->name;
      if (seen.insert(name).second) {
        named.params.push_back(name);
      }
    }
    for (const auto& field : kind_.fields_of(const_cast<torch::optim::OptimizerOptions&>(group.options()))) {
      named.options[field.name] = value_of(field); // only read
    }
  }
  return groups;
}

namespace {

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

void replace_state(torch::optim::Optimizer& optimizer, const OptimizerByName& by_name, const NewState& wanted) {
  auto& states = optimizer.state();
  if (!by_name.kind().needs_state()) {
    for (const NamedTensor* param : by_name.params()) {
      states.erase(param->leaf().unsafeGetTensorImpl());
    }
  }
  for (const auto& [param, state] : wanted.params) {
    states[param->leaf().unsafeGetTensorImpl()] = make_state(by_name.kind(), state);
  }
  for (size_t group = 0; group < wanted.options.size(); ++group) {
    set_options(optimizer.param_groups()[group].options(), by_name.kind(), wanted.options[group]);
  }
}

} // namespace fsdp::state
