#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <torch/optim/serialize.h>

#include <fsdp/optim.h>

#include "base/check.h"
#include "optim/flat_shards.h"
#include "optim/line_search.h"

namespace fsdp::optim {
namespace {

using torch::optim::LBFGSOptions;
using torch::optim::LBFGSParamState;
using torch::optim::OptimizerParamGroup;

/// What the last steps say about curvature, and the direction that follows from it.
class History {
 public:
  History(const FlatShards& shards, LBFGSParamState& state) : shards_(shards), state_(state) {}

  void add(const at::Tensor& gradient_change, const at::Tensor& step, int64_t at_most) {
    const double curvature = shards_.dot(gradient_change, step);
    if (curvature <= 1e-10) {
      return;
    }
    if (static_cast<int64_t>(state_.old_dirs().size()) == at_most) {
      state_.old_dirs().pop_front();
      state_.old_stps().pop_front();
      state_.ro().pop_front();
    }
    state_.old_dirs().push_back(gradient_change);
    state_.old_stps().push_back(step);
    state_.ro().push_back(scalar(1 / curvature));
    state_.H_diag(scalar(curvature / shards_.dot(gradient_change, gradient_change)));
  }

  /// Minus the inverse Hessian, as far as it is known, times the gradient: the two-loop recursion.
  at::Tensor direction(const at::Tensor& gradient) const {
    const auto& changes = state_.old_dirs();
    const auto& steps = state_.old_stps();
    std::vector<double> weights(changes.size());
    at::Tensor result = gradient.neg();
    for (size_t i = changes.size(); i-- > 0;) {
      weights[i] = shards_.dot(steps[i], result) * inverse_curvature(i);
      result.add_(changes[i], -weights[i]);
    }
    result.mul_(state_.H_diag().item<double>());
    for (size_t i = 0; i < changes.size(); ++i) {
      result.add_(steps[i], weights[i] - shards_.dot(changes[i], result) * inverse_curvature(i));
    }
    return result;
  }

  static at::Tensor scalar(double value) {
    return at::full({}, value, at::kDouble);
  }

 private:
  double inverse_curvature(size_t index) const {
    return state_.ro()[index].item<double>();
  }

  const FlatShards& shards_;
  LBFGSParamState& state_;
};

/// One call of `step`.
class Step {
 public:
  Step(
      const FlatShards& shards,
      const LBFGSOptions& options,
      LBFGSParamState& state,
      const torch::optim::Optimizer::LossClosure& closure)
      : shards_(shards), options_(options), state_(state), history_(shards, state), closure_(closure) {}

  torch::Tensor run() {
    const torch::Tensor first_loss = evaluate();
    if (shards_.largest(gradient_) <= options_.tolerance_grad()) {
      return first_loss;
    }
    for (int64_t iteration = 1; iteration <= options_.max_iter(); ++iteration) {
      if (!iterate(/*last=*/iteration == options_.max_iter()) || evaluations_ >= *options_.max_eval()) {
        break;
      }
    }
    return first_loss;
  }

 private:
  /// Gradients of the parameters as they are, and the loss, which all ranks have to judge alike.
  torch::Tensor evaluate() {
    const at::AutoGradMode enable_grad(true);
    const torch::Tensor loss = closure_();
    const at::NoGradGuard no_grad;
    loss_ = shards_.average_over_ranks(loss.item<double>());
    gradient_ = shards_.gradients();
    ++evaluations_;
    state_.func_evals(state_.func_evals() + 1);
    return loss;
  }

  void choose_direction() {
    state_.n_iter(state_.n_iter() + 1);
    if (state_.n_iter() == 1) {
      state_.d(gradient_.neg());
      state_.H_diag(History::scalar(1));
    } else {
      history_.add(gradient_ - state_.prev_flat_grad(), state_.d() * state_.t(), options_.history_size());
      state_.d(history_.direction(gradient_));
    }
    state_.prev_flat_grad(gradient_);
    state_.prev_loss(loss_);
    const bool is_first = state_.n_iter() == 1;
    state_.t((is_first ? std::min(1.0, 1 / shards_.sum_of_absolutes(gradient_)) : 1.0) * options_.lr());
  }

  /// Whether there is more to do.
  bool iterate(bool last) {
    choose_direction();
    const double slope = shards_.dot(gradient_, state_.d());
    if (slope > -options_.tolerance_change()) {
      return false;
    }
    if (options_.line_search_fn()) {
      search_line(slope);
    } else {
      shards_.move(state_.d(), state_.t());
      if (last) {
        return false;
      }
      evaluate();
    }
    return !last && shards_.largest(gradient_) > options_.tolerance_grad() &&
           std::abs(state_.t()) * shards_.largest(state_.d()) > options_.tolerance_change() &&
           std::abs(loss_ - state_.prev_loss()) >= options_.tolerance_change();
  }

  void search_line(double slope) {
    const at::Tensor start = shards_.values();
    const auto at_step = [&](double step) {
      shards_.set_values(start);
      shards_.move(state_.d(), step);
      evaluate();
      return LinePoint{step, loss_, shards_.dot(gradient_, state_.d()), gradient_};
    };
    const LinePoint here{0, loss_, slope, gradient_};
    const auto [best, evaluations] = strong_wolfe(here, state_.t(), shards_.largest(state_.d()), at_step);
    shards_.set_values(start);
    shards_.move(state_.d(), best.step);
    state_.t(best.step);
    loss_ = best.value;
    gradient_ = best.gradient;
  }

  const FlatShards& shards_;
  const LBFGSOptions& options_;
  LBFGSParamState& state_;
  History history_;
  const torch::optim::Optimizer::LossClosure& closure_;
  double loss_ = 0;
  at::Tensor gradient_;
  int64_t evaluations_ = 0;
};

} // namespace

LBFGS::LBFGS(const std::vector<OptimizerParamGroup>& param_groups, LBFGSOptions defaults)
    : Optimizer(param_groups, std::make_unique<LBFGSOptions>(defaults)) {
  FSDP_CHECK(
      param_groups_.size() == 1,
      "[LBFGS] expected one group of parameters, which are one vector to it, got {}. Give all of them in one list",
      param_groups_.size());
  auto& options = static_cast<LBFGSOptions&>(param_groups_[0].options());
  FSDP_CHECK(
      !options.line_search_fn() || *options.line_search_fn() == "strong_wolfe",
      "[LBFGS] expected line_search_fn \"strong_wolfe\" or none, got \"{}\"",
      *options.line_search_fn());
  options.max_eval(options.max_eval().value_or(options.max_iter() * 5 / 4));
}

LBFGS::LBFGS(std::vector<torch::Tensor> params, LBFGSOptions defaults)
    : LBFGS({OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

torch::Tensor LBFGS::step(LossClosure closure) {
  FSDP_CHECK(
      closure != nullptr, "[LBFGS] expected a closure that computes the loss and its gradients: step([&] { ... })");
  const at::NoGradGuard no_grad;
  const OptimizerParamGroup& group = param_groups_[0];
  FSDP_CHECK(!group.params().empty(), "[LBFGS] expected parameters, got none");
  auto& state = state_[group.params()[0].unsafeGetTensorImpl()];
  if (!state) {
    state = std::make_unique<LBFGSParamState>();
  }
  const FlatShards shards(group.params());
  return Step(shards, static_cast<const LBFGSOptions&>(group.options()), static_cast<LBFGSParamState&>(*state), closure)
      .run();
}

void LBFGS::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<LBFGSParamState, LBFGSOptions>(archive, *this);
}

void LBFGS::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<LBFGSParamState, LBFGSOptions>(archive, *this);
}

} // namespace fsdp::optim
