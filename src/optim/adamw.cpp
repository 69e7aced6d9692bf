#include <cmath>
#include <memory>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/serialize.h>

#include <fsdp/optim.h>

#include "base/check.h"
#include "base/private_memory.h"
#include "optim/adamw_kernel.h"
#include "optim/adamw_op.h"

namespace fsdp::optim {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerParamGroup;

void check_beta(double beta, const char* name) {
  FSDP_CHECK(beta >= 0 && beta < 1, "[AdamW] expected {} in [0, 1), got {}", name, beta);
}

void check_options(const AdamWOptions& options) {
  FSDP_CHECK(options.lr() >= 0, "[AdamW] expected a learning rate of at least 0, got {}", options.lr());
  FSDP_CHECK(options.eps() >= 0, "[AdamW] expected eps of at least 0, got {}", options.eps());
  FSDP_CHECK(
      options.weight_decay() >= 0, "[AdamW] expected a weight decay of at least 0, got {}", options.weight_decay());
  check_beta(std::get<0>(options.betas()), "beta1");
  check_beta(std::get<1>(options.betas()), "beta2");
}

void check_gradient(const at::Tensor& param, const at::Tensor& grad) {
  FSDP_CHECK(
      grad.layout() == at::kStrided,
      "[AdamW] expected dense gradients, got a {} one. Build the Embedding with sparse(false), or use "
      "torch::optim::SGD for it.",
      grad.layout());
  FSDP_CHECK(
      grad.scalar_type() == param.scalar_type(),
      "[AdamW] expected the gradient of a {} parameter in its dtype, got {}. Cast it before the step: "
      "param.mutable_grad() = param.grad().to(param.scalar_type()).",
      param.scalar_type(),
      grad.scalar_type());
  FSDP_CHECK(
      grad.device() == param.device() && grad.sizes() == param.sizes(),
      "[AdamW] expected a gradient of shape {} on {}, as its parameter, got {} on {}. Clear it with zero_grad() and "
      "run backward again.",
      param.sizes(),
      param.device(),
      grad.sizes(),
      grad.device());
  FSDP_CHECK(
      !param.is_cpu() || has_adamw_kernel(param.scalar_type()),
      "[AdamW] expected parameters of float32, float64, bfloat16 or float16, got {}. Leave them to another optimizer.",
      param.scalar_type());
}

void check_state(const at::Tensor& param, const at::Tensor& average) {
  FSDP_CHECK(
      average.defined() && average.sizes() == param.sizes() && average.scalar_type() == param.scalar_type() &&
          average.device() == param.device(),
      "[AdamW] expected optimizer state like its parameter ({} {} on {}), got {}. Load it with fsdp::load "
      "or fsdp::load_optim_state_dict, which take it from any sharding.",
      param.scalar_type(),
      param.sizes(),
      param.device(),
      average.defined() ? phrase("{} {} on {}", average.scalar_type(), average.sizes(), average.device()) : "none");
}

// The parameters of a group that are updated by one call.
struct Batch {
  AdamWTensors tensors;
  std::vector<AdamWParamState*> states;

  bool takes(const at::Tensor& param) const {
    const at::Tensor& first = tensors.params.front();
    return first.scalar_type() == param.scalar_type() && first.device() == param.device();
  }

  void reserve(size_t count) {
    for (auto* list : {&tensors.params, &tensors.grads, &tensors.exp_avgs, &tensors.exp_avg_sqs}) {
      list->reserve(count);
    }
    tensors.steps.reserve(count);
    states.reserve(count);
  }

  void add(const at::Tensor& param, const at::Tensor& grad, AdamWParamState& state, bool amsgrad) {
    tensors.params.push_back(param);
    tensors.grads.push_back(grad);
    tensors.exp_avgs.push_back(state.exp_avg());
    tensors.exp_avg_sqs.push_back(state.exp_avg_sq());
    if (amsgrad) {
      tensors.max_exp_avg_sqs.push_back(state.max_exp_avg_sq());
    }
    tensors.steps.push_back(state.step() + 1);
    states.push_back(&state);
  }
};

using StateMap = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

void complete_state(AdamWParamState& state, const at::Tensor& param, bool amsgrad) {
  const PrivateMemory for_state;
  if (!state.exp_avg().defined()) {
    state.exp_avg(at::zeros_like(param, at::MemoryFormat::Preserve));
    state.exp_avg_sq(at::zeros_like(param, at::MemoryFormat::Preserve));
  }
  if (amsgrad && !state.max_exp_avg_sq().defined()) {
    state.max_exp_avg_sq(at::zeros_like(param, at::MemoryFormat::Preserve));
  }
  check_state(param, state.exp_avg());
  check_state(param, state.exp_avg_sq());
  if (amsgrad) {
    check_state(param, state.max_exp_avg_sq());
  }
}

AdamWParamState& state_of(StateMap& states, const at::Tensor& param, bool amsgrad) {
  auto& state = states[param.unsafeGetTensorImpl()];
  if (!state) {
    state = std::make_unique<AdamWParamState>();
  }
  auto& mine = static_cast<AdamWParamState&>(*state);
  complete_state(mine, param, amsgrad);
  return mine;
}

Batch& batch_for(std::vector<Batch>& batches, const at::Tensor& param, size_t at_most) {
  for (Batch& batch : batches) {
    if (batch.takes(param)) {
      return batch;
    }
  }
  batches.emplace_back().reserve(at_most);
  return batches.back();
}

// Checks everything and changes no number, so that a step that fails here did nothing. `Module::parameters()` lists a
// weight as often as modules share it; it is updated once.
std::vector<Batch> batches_of(const OptimizerParamGroup& group, StateMap& states) {
  const bool amsgrad = static_cast<const AdamWOptions&>(group.options()).amsgrad();
  std::vector<Batch> batches;
  ska::flat_hash_set<const void*> seen(group.params().size());
  for (const at::Tensor& param : group.params()) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined() || !seen.insert(param.unsafeGetTensorImpl()).second) {
      continue;
    }
    check_gradient(param, grad);
    batch_for(batches, param, group.params().size()).add(param, grad, state_of(states, param, amsgrad), amsgrad);
  }
  return batches;
}

void run(const Batch& batch, const AdamWOptions& options) {
  const AdamWSettings settings{
      .lr = options.lr(),
      .beta1 = std::get<0>(options.betas()),
      .beta2 = std::get<1>(options.betas()),
      .weight_decay = options.weight_decay(),
      .eps = options.eps()};
  fused_adamw_(batch.tensors, settings);
  for (size_t i = 0; i < batch.states.size(); ++i) {
    batch.states[i]->step(batch.tensors.steps[i]);
  }
}

} // namespace

AdamW::AdamW(const std::vector<OptimizerParamGroup>& param_groups, AdamWOptions defaults)
    : Optimizer(param_groups, std::make_unique<AdamWOptions>(defaults)) {
  for (const OptimizerParamGroup& group : param_groups_) {
    check_options(static_cast<const AdamWOptions&>(group.options()));
  }
}

AdamW::AdamW(std::vector<torch::Tensor> params, AdamWOptions defaults)
    : AdamW({OptimizerParamGroup(std::move(params))}, std::move(defaults)) {}

torch::Tensor AdamW::step(LossClosure closure) {
  at::NoGradGuard no_grad;
  torch::Tensor loss;
  if (closure) {
    at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  std::vector<std::pair<Batch, const AdamWOptions*>> work;
  for (const OptimizerParamGroup& group : param_groups_) {
    for (Batch& batch : batches_of(group, state_)) {
      work.emplace_back(std::move(batch), static_cast<const AdamWOptions*>(&group.options()));
    }
  }
  for (const auto& [batch, options] : work) {
    run(batch, *options);
  }
  return loss;
}

void AdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, *this);
}

void AdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<AdamWParamState, AdamWOptions>(archive, *this);
}

} // namespace fsdp::optim
