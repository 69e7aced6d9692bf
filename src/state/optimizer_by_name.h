#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <fsdp/optim_state_dict.h>

#include "state/named_tensors.h"
#include "state/optim_fields.h"

namespace fsdp::state {

/// An optimizer of a model's parameters, which it knows as tensors, by their names. For the time of a call.
class OptimizerByName {
 public:
  using Values = std::map<std::string, c10::IValue>;
  using ParamState = OptimStateDict::ParamState;
  using ParamGroup = OptimStateDict::ParamGroup;

  /// An error if the optimizer has parameters that are not among `tensors`, or is of a kind whose state does not belong
  /// to single parameters.
  OptimizerByName(
      const std::vector<NamedTensor>& tensors, const torch::optim::Optimizer& optimizer, const char* operation);

  const OptimizerKind& kind() const {
    return kind_;
  }
  /// Those that the optimizer has, in the model's order; tied ones once, and of a flat parameter all that lie in it.
  const std::vector<const NamedTensor*>& params() const {
    return params_;
  }
  /// Null if the optimizer does not have it.
  const NamedTensor* find(const std::string& name) const;
  const NamedTensor* find(const at::Tensor& leaf) const;
  /// A parameter's first name; of what is no parameter, the name itself.
  const std::string& first_name(const std::string& name) const;

  /// What is here of it, not copied; nothing if it has none.
  std::optional<ParamState> state_of(const NamedTensor& param) const;
  /// Their parameters, each once, and hyper-parameters.
  std::vector<ParamGroup> groups() const;

 private:
  void add_names(const std::vector<NamedTensor>& tensors);
  void add_params(const std::vector<NamedTensor>& tensors);
  void check_params(const torch::optim::OptimizerParamGroup& group, const char* operation) const;

  const torch::optim::Optimizer& optimizer_;
  const OptimizerKind& kind_;
  std::unordered_map<const c10::TensorImpl*, const NamedTensor*> by_leaf_; // all parameters, under their first names
  std::unordered_map<const c10::TensorImpl*, std::vector<const NamedTensor*>> by_trained_; // the same
  std::unordered_map<std::string, const NamedTensor*> by_name_; // likewise, by any name
  std::vector<const NamedTensor*> params_;
  std::unordered_set<const NamedTensor*> optimized_; // the same
};

/// A model's optimizer, for the time of a call.
struct OptimizerOfModel {
  OptimizerOfModel(ModuleRef module, const torch::optim::Optimizer& given, const char* name_of_call)
      : operation(name_of_call),
        optimizer(given),
        tensors(named_tensors(module, operation)),
        by_name(tensors, optimizer, operation) {}
  OptimizerOfModel(const OptimizerOfModel&) = delete; // one points into the other

  const char* operation;
  const torch::optim::Optimizer& optimizer;
  std::vector<NamedTensor> tensors;
  OptimizerByName by_name;
};

/// What an optimizer is to have.
struct NewState {
  std::vector<std::pair<const NamedTensor*, OptimStateDict::ParamState>> params{}; ///< of tensors like the leaves
  std::vector<OptimizerByName::Values> options{}; ///< by group
};

/// New states and hyper-parameters, made and not yet the optimizer's; those that it does not know are left out.
class MadeState {
 public:
  MadeState(torch::optim::Optimizer& optimizer, const OptimizerByName& by_name, const NewState& wanted);

  /// What is not there has no state afterwards.
  void give_to_optimizer();

 private:
  torch::optim::Optimizer* optimizer_;
  const OptimizerKind* kind_;
  std::vector<void*> without_state_{};
  std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>> states_{};
  std::vector<OptimizerByName::Values> options_;
};

} // namespace fsdp::state
