#include "state/optim_fields.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include <ATen/core/ivalue_inl.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <fsdp/optim.h>

#include "base/check.h"

namespace fsdp::state {

namespace {

using namespace torch::optim; // NOLINT: a list of its names

using Fields = std::vector<NamedField>;

Fields list(SGDParamState& state) {
  return {{"momentum_buffer", &state.momentum_buffer()}};
}

std::vector<const char*> needed(const SGDOptions& /*options*/) {
  return {};
}

Fields list(SGDOptions& options) {
  return {
      {"lr", &options.lr()},
      {"momentum", &options.momentum()},
      {"dampening", &options.dampening()},
      {"weight_decay", &options.weight_decay()},
      {"nesterov", &options.nesterov()}};
}

template <typename State>
Fields list_adam_state(State& state) {
  return {
      {"step", &state.step()},
      {"exp_avg", &state.exp_avg()},
      {"exp_avg_sq", &state.exp_avg_sq()},
      {"max_exp_avg_sq", &state.max_exp_avg_sq()}};
}

template <typename Options>
Fields list_adam_options(Options& options) {
  return {
      {"lr", &options.lr()},
      {"betas", &options.betas()},
      {"eps", &options.eps()},
      {"weight_decay", &options.weight_decay()},
      {"amsgrad", &options.amsgrad()}};
}

template <typename Options>
std::vector<const char*> needed_by_adam(const Options& options) {
  return options.amsgrad() ? std::vector{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
                           : std::vector{"exp_avg", "exp_avg_sq"};
}

std::vector<const char*> needed(const AdamOptions& options) {
  return needed_by_adam(options);
}

std::vector<const char*> needed(const AdamWOptions& options) {
  return needed_by_adam(options);
}

Fields list(AdamParamState& state) {
  return list_adam_state(state);
}

Fields list(AdamOptions& options) {
  return list_adam_options(options);
}

Fields list(AdamWParamState& state) {
  return list_adam_state(state);
}

Fields list(AdamWOptions& options) {
  return list_adam_options(options);
}

Fields list(AdagradParamState& state) {
  return {{"step", &state.step()}, {"sum", &state.sum()}};
}

std::vector<const char*> needed(const AdagradOptions& /*options*/) {
  return {"sum"};
}

Fields list(AdagradOptions& options) {
  return {
      {"lr", &options.lr()},
      {"lr_decay", &options.lr_decay()},
      {"weight_decay", &options.weight_decay()},
      {"initial_accumulator_value", &options.initial_accumulator_value()},
      {"eps", &options.eps()}};
}

Fields list(RMSpropParamState& state) {
  return {
      {"step", &state.step()},
      {"square_avg", &state.square_avg()},
      {"momentum_buffer", &state.momentum_buffer()},
      {"grad_avg", &state.grad_avg()}};
}

std::vector<const char*> needed(const RMSpropOptions& options) {
  std::vector<const char*> needed{"square_avg"};
  if (options.momentum() > 0) {
    needed.push_back("momentum_buffer");
  }
  if (options.centered()) {
    needed.push_back("grad_avg");
  }
  return needed;
}

Fields list(RMSpropOptions& options) {
  return {
      {"lr", &options.lr()},
      {"alpha", &options.alpha()},
      {"eps", &options.eps()},
      {"weight_decay", &options.weight_decay()},
      {"momentum", &options.momentum()},
      {"centered", &options.centered()}};
}

template <typename State, typename Options>
class Kind final : public OptimizerKind {
 public:
  Fields fields_of(OptimizerParamState& state) const override {
    return list(dynamic_cast<State&>(state));
  }
  Fields fields_of(OptimizerOptions& options) const override {
    return list(dynamic_cast<Options&>(options));
  }
  std::vector<const char*> needed_tensors(const OptimizerOptions& options) const override {
    return needed(dynamic_cast<const Options&>(options));
  }
  std::unique_ptr<OptimizerParamState> make_state() const override {
    return std::make_unique<State>();
  }
  bool needs_state() const override {
    return std::is_same_v<State, AdagradParamState>;
  }
  bool decays_apart() const override {
    return std::is_same_v<Options, AdamWOptions>;
  }
};

const Kind<SGDParamState, SGDOptions> kSGD;
const Kind<AdamParamState, AdamOptions> kAdam;
const Kind<AdamWParamState, AdamWOptions> kAdamW;
const Kind<AdagradParamState, AdagradOptions> kAdagrad;
const Kind<RMSpropParamState, RMSpropOptions> kRMSprop;

template <typename Class>
bool is(const Optimizer& optimizer) {
  return dynamic_cast<const Class*>(&optimizer) != nullptr;
}

const OptimizerKind* find_kind(const Optimizer& optimizer) {
  if (is<SGD>(optimizer)) {
    return &kSGD;
  }
  if (is<Adam>(optimizer)) {
    return &kAdam;
  }
  if (is<AdamW>(optimizer) || is<fsdp::optim::AdamW>(optimizer)) {
    return &kAdamW;
  }
  if (is<Adagrad>(optimizer)) {
    return &kAdagrad;
  }
  return is<RMSprop>(optimizer) ? &kRMSprop : nullptr;
}

} // namespace

const OptimizerKind& kind_of(const Optimizer& optimizer, const char* operation) {
  FSDP_CHECK(
      !is<LBFGS>(optimizer) && !is<fsdp::optim::LBFGS>(optimizer),
      "[{}] LBFGS keeps vectors of all parameters together, in which no parameter has a place that another sharding "
      "could find: torch::save the optimizer once per rank and load it with the same sharding, or begin anew, which "
      "costs it no more than its history",
      operation);
  const OptimizerKind* kind = find_kind(optimizer);
  FSDP_CHECK(
      kind != nullptr,
      "[{}] expected SGD, Adam, AdamW, Adagrad or RMSprop of torch::optim or fsdp::optim::AdamW, got {}, of whose "
      "state nothing is known: torch::save it once per rank, and load it with the same sharding",
      operation,
      c10::demangle(typeid(optimizer).name()));
  return *kind;
}

namespace {

struct Reader {
  c10::IValue operator()(const at::Tensor* /*tensor*/) const {
    TORCH_INTERNAL_ASSERT(false);
  }
  c10::IValue operator()(const std::tuple<double, double>* pair) const {
    return c10::ivalue::Tuple::create(std::get<0>(*pair), std::get<1>(*pair));
  }
  template <typename Number>
  c10::IValue operator()(const Number* number) const {
    return *number;
  }
};

c10::Scalar number_in(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor().item() : value.toScalar();
}

bool is_number(const c10::IValue& value) {
  return value.isInt() || value.isDouble() || value.isBool() ||
         (value.isTensor() && value.toTensor().defined() && value.toTensor().numel() == 1 &&
          !value.toTensor().is_complex());
}

struct Fit {
  const c10::IValue& value;

  bool operator()(const at::Tensor* /*tensor*/) const {
    return false;
  }
  bool operator()(const std::tuple<double, double>* /*pair*/) const {
    if (!value.isTuple() || value.toTupleRef().elements().size() != 2) {
      return false;
    }
    const auto& two = value.toTupleRef().elements();
    return is_number(two[0]) && is_number(two[1]);
  }
  bool operator()(const int64_t* /*number*/) const {
    constexpr double kMost = 1e18; // fits into 64 bits
    return is_number(value) && std::abs(number_in(value).toDouble()) < kMost;
  }
  template <typename Number>
  bool operator()(const Number* /*number*/) const {
    return is_number(value);
  }
};

struct Writer {
  const c10::IValue& value;

  void operator()(at::Tensor* /*tensor*/) const {
    TORCH_INTERNAL_ASSERT(false);
  }
  void operator()(std::tuple<double, double>* pair) const {
    const auto& two = value.toTupleRef().elements();
    *pair = {number_in(two[0]).toDouble(), number_in(two[1]).toDouble()};
  }
  void operator()(int64_t* number) const {
    *number = number_in(value).toLong();
  }
  void operator()(double* number) const {
    *number = number_in(value).toDouble();
  }
  void operator()(bool* flag) const {
    *flag = number_in(value).toBool();
  }
};

} // namespace

c10::IValue value_of(const NamedField& field) {
  return std::visit(Reader(), field.place);
}

bool fits(const NamedField& field, const c10::IValue& value) {
  return std::visit(Fit{value}, field.place);
}

bool may_change_steps(const c10::IValue& value) {
  if (value.isTuple()) {
    const auto elements = value.toTupleRef().elements().asArrayRef();
    return std::any_of(elements.begin(), elements.end(), &may_change_steps);
  }
  if (is_number(value)) {
    return number_in(value).toDouble() != 0;
  }
  return !value.isNone() && !value.isString();
}

void assign(const NamedField& field, const c10::IValue& value) {
  std::visit(Writer{value}, field.place);
}

} // namespace fsdp::state
