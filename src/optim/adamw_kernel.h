#pragma once

#include <cstdint>

#include <c10/core/ScalarType.h>

namespace fsdp::optim {

/// What one AdamW step does to each element, worked out once per tensor.
struct AdamWFactors {
  double decay; ///< 1 - lr * weight_decay
  double beta1;
  double beta2;
  double eps;
  double step_size; ///< lr / (1 - beta1^step)
  double correction; ///< sqrt(1 - beta2^step)
};

/// Equally long runs of memory of one dtype.
struct AdamWSpan {
  void* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq; ///< null without amsgrad
};

/// Float32, float64, bfloat16 and float16: what `adamw_update` can do.
bool has_adamw_kernel(c10::ScalarType dtype);

/// One step on `count` adjacent elements. Every element gets the same bits wherever a run begins or ends; half types
/// are computed in float32 and rounded once per result. Thread safe for disjoint spans.
void adamw_update(c10::ScalarType dtype, const AdamWSpan& span, int64_t count, const AdamWFactors& factors);

} // namespace fsdp::optim
