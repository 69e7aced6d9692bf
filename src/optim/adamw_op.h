#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::optim {

struct AdamWSettings {
  double lr;
  double beta1;
  double beta2;
  double weight_decay;
  double eps;
};

/// Tensors of one dtype on one device, in step with each other. `max_exp_avg_sqs` is empty without amsgrad.
struct AdamWTensors {
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> exp_avgs;
  std::vector<at::Tensor> exp_avg_sqs;
  std::vector<at::Tensor> max_exp_avg_sqs;
  std::vector<int64_t> steps; ///< each tensor's, this one counted
};

/// One AdamW step on all of them, as one operator call, so that whoever watches writes to the parameters sees it.
void fused_adamw_(const AdamWTensors& tensors, const AdamWSettings& settings);

} // namespace fsdp::optim
