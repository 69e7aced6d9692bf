#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

/// What LibTorch's optimizers have in typed members, by name.
namespace fsdp::state {

using Field = std::variant<at::Tensor*, int64_t*, double*, bool*, std::tuple<double, double>*>;
struct NamedField {
  const char* name = nullptr;
  Field place{};

  at::Tensor* tensor() const {
    const auto* tensor = std::get_if<at::Tensor*>(&place);
    return tensor != nullptr ? *tensor : nullptr;
  }
};

/// One of the optimizers whose state belongs to single parameters.
class OptimizerKind {
 public:
  virtual ~OptimizerKind() = default;
  virtual std::vector<NamedField> fields_of(torch::optim::OptimizerParamState& state) const = 0;
  virtual std::vector<NamedField> fields_of(torch::optim::OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state() const = 0;
  /// Of a parameter's state: no step can be made without these.
  virtual std::vector<const char*> needed_tensors(const torch::optim::OptimizerOptions& options) const = 0;
  /// There is state before the first step, without which no step can be made.
  virtual bool needs_state() const = 0;
  /// Weights decay beside the step, not through the gradient.
  virtual bool decays_apart() const = 0;
};

/// An error that says why, for other optimizers.
const OptimizerKind& kind_of(const torch::optim::Optimizer& optimizer, const char* operation);

/// Not of a tensor.
c10::IValue value_of(const NamedField& field);
/// Whether it is of the field's kind. Whole numbers may come as any number, and in tensors of one element, as Python's
/// `step` does.
bool fits(const NamedField& field, const c10::IValue& value);
/// Of a hyper-parameter that nobody knows: it is on, or a number other than 0. A text or None changes no step.
bool may_change_steps(const c10::IValue& value);
/// Of what fits.
void assign(const NamedField& field, const c10::IValue& value);

} // namespace fsdp::state
