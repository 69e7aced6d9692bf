#include "optim/adamw_op.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include "optim/adamw_kernel.h"

// [Note: an AdamW operator of our own]
// LibTorch's fused CPU kernel computes the last few elements of a tensor (those that do not fill a vector) in another
// way than the rest, so a parameter's values would depend on where it was cut. This one gives each element the same
// bits everywhere. It is a dispatcher operator with a schema like LibTorch's, because writes to shards are seen by its
// alias annotations.

namespace fsdp::optim {
namespace {

AdamWFactors factors_at(int64_t step, const AdamWSettings& settings) {
  const auto count = static_cast<double>(step);
  return {
      .decay = 1 - settings.lr * settings.weight_decay,
      .beta1 = settings.beta1,
      .beta2 = settings.beta2,
      .eps = settings.eps,
      .step_size = settings.lr / (1 - std::pow(settings.beta1, count)),
      .correction = std::sqrt(1 - std::pow(settings.beta2, count))};
}

// The tensors of one parameter. The last one is undefined without amsgrad.
struct Operands {
  const at::Tensor& param;
  const at::Tensor& grad;
  const at::Tensor& exp_avg;
  const at::Tensor& exp_avg_sq;
  const at::Tensor& max_exp_avg_sq;

  bool contiguous() const {
    return param.is_contiguous() && grad.is_contiguous() && exp_avg.is_contiguous() && exp_avg_sq.is_contiguous() &&
           (!max_exp_avg_sq.defined() || max_exp_avg_sq.is_contiguous());
  }
};

void update_in_one_run(const Operands& on, const AdamWFactors& factors) {
  const AdamWSpan span{
      .param = on.param.mutable_data_ptr(),
      .grad = on.grad.const_data_ptr(),
      .exp_avg = on.exp_avg.mutable_data_ptr(),
      .exp_avg_sq = on.exp_avg_sq.mutable_data_ptr(),
      .max_exp_avg_sq = on.max_exp_avg_sq.defined() ? on.max_exp_avg_sq.mutable_data_ptr() : nullptr};
  adamw_update(on.param.scalar_type(), span, on.param.numel(), factors);
}

constexpr int kMostOperands = 5;

struct IteratorRow {
  int operands;
  std::array<char*, kMostOperands> data;
  const int64_t* strides; ///< in bytes, per operand
  int64_t count;
};

// Adjacent elements in one run, others one by one. The iterator's operands: outputs first, as they were added.
void update_row(const IteratorRow& row, c10::ScalarType dtype, const AdamWFactors& factors) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const bool adjacent =
      std::all_of(row.strides, row.strides + row.operands, [&](int64_t stride) { return stride == element; });
  const int64_t run = adjacent ? row.count : 1;
  for (int64_t i = 0; i < row.count; i += run) {
    const auto at = [&](int operand) { return row.data[operand] + i * row.strides[operand]; };
    const AdamWSpan span{
        .param = at(0),
        .grad = at(row.operands - 1),
        .exp_avg = at(1),
        .exp_avg_sq = at(2),
        .max_exp_avg_sq = row.operands == kMostOperands ? at(3) : nullptr};
    adamw_update(dtype, span, run, factors);
  }
}

// For layouts of any kind, and for tensors big enough to be shared among threads.
void update_by_iterator(const Operands& on, const AdamWFactors& factors) {
  at::TensorIteratorConfig config;
  config.add_output(on.param).add_output(on.exp_avg).add_output(on.exp_avg_sq);
  const bool amsgrad = on.max_exp_avg_sq.defined();
  if (amsgrad) {
    config.add_output(on.max_exp_avg_sq);
  }
  auto iterator = config.add_const_input(on.grad).resize_outputs(false).build();
  const c10::ScalarType dtype = on.param.scalar_type();
  const int operands = iterator.ntensors();
  iterator.for_each([&](char** data, const int64_t* strides, int64_t count, int64_t rows) {
    IteratorRow row{operands, {}, strides, count};
    for (int64_t i = 0; i < rows; ++i) {
      for (int operand = 0; operand < operands; ++operand) {
        row.data[operand] = data[operand] + i * strides[operands + operand];
      }
      update_row(row, dtype, factors);
    }
  });
}

void update_one(const Operands& on, const AdamWFactors& factors) {
  const bool one_thread = on.param.numel() <= at::internal::GRAIN_SIZE || at::get_num_threads() == 1;
  if (one_thread && on.contiguous()) {
    update_in_one_run(on, factors);
  } else {
    update_by_iterator(on, factors);
  }
  if (!on.param.unsafeGetTensorImpl()->is_inference()) {
    on.param.unsafeGetTensorImpl()->bump_version();
  }
}

void fused_adamw_cpu(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList exp_avgs,
    at::TensorList exp_avg_sqs,
    at::TensorList max_exp_avg_sqs,
    at::IntArrayRef steps,
    double lr,
    double beta1,
    double beta2,
    double weight_decay,
    double eps) {
  const AdamWSettings settings{.lr = lr, .beta1 = beta1, .beta2 = beta2, .weight_decay = weight_decay, .eps = eps};
  const at::Tensor none;
  for (size_t i = 0; i < params.size(); ++i) {
    const Operands operands{
        params[i], grads[i], exp_avgs[i], exp_avg_sqs[i], max_exp_avg_sqs.empty() ? none : max_exp_avg_sqs[i]};
    update_one(operands, factors_at(steps[i], settings));
  }
}

void call_own(const AdamWTensors& on, const AdamWSettings& settings) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fsdp::fused_adamw_", "").typed<decltype(fused_adamw_cpu)>();
  op.call(
      on.params,
      on.grads,
      on.exp_avgs,
      on.exp_avg_sqs,
      on.max_exp_avg_sqs,
      on.steps,
      settings.lr,
      settings.beta1,
      settings.beta2,
      settings.weight_decay,
      settings.eps);
}

// LibTorch's kernels want the steps as tensors on the device. Tensors in step share one.
std::vector<at::Tensor> step_tensors(const std::vector<int64_t>& steps, c10::Device device) {
  std::map<int64_t, at::Tensor> made;
  std::vector<at::Tensor> tensors;
  tensors.reserve(steps.size());
  for (int64_t step : steps) {
    at::Tensor& tensor = made[step];
    if (!tensor.defined()) {
      tensor = at::full({}, static_cast<double>(step), at::device(device).dtype(at::kFloat));
    }
    tensors.push_back(tensor);
  }
  return tensors;
}

void call_devices_own(const AdamWTensors& on, const AdamWSettings& settings) {
  const auto steps = step_tensors(on.steps, on.params[0].device());
  at::_fused_adamw_(
      on.params,
      on.grads,
      on.exp_avgs,
      on.exp_avg_sqs,
      on.max_exp_avg_sqs,
      steps,
      settings.lr,
      settings.beta1,
      settings.beta2,
      settings.weight_decay,
      settings.eps,
      /*amsgrad=*/!on.max_exp_avg_sqs.empty(),
      /*maximize=*/false);
}

} // namespace

void fused_adamw_(const AdamWTensors& tensors, const AdamWSettings& settings) {
  if (tensors.params[0].is_cpu()) {
    call_own(tensors, settings);
  } else {
    call_devices_own(tensors, settings);
  }
}

TORCH_LIBRARY_FRAGMENT(fsdp, library) {
  library.def(
      "fused_adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] max_exp_avg_sqs, int[] steps, float lr, float beta1, float beta2, float weight_decay, float eps) "
      "-> ()");
}

TORCH_LIBRARY_IMPL(fsdp, CPU, library) {
  library.impl("fused_adamw_", TORCH_FN(fused_adamw_cpu));
}

// Optimizers run without gradient recording; nothing is to be derived.
TORCH_LIBRARY_IMPL(fsdp, Autograd, library) {
  library.impl("fused_adamw_", torch::CppFunction::makeFallthrough());
}

} // namespace fsdp::optim
