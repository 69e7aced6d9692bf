#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

/// A division split in two around a sum. Only fp16 needs the first half: its sum over many ranks can exceed 65504, so
/// half of the factor (a power of two near its root, which costs no precision) is divided out before, as PyTorch does.
/// bf16 has the range of fp32. All other dtypes divide once, truly, after the sum.
struct Division {
  Division(double divide_by, c10::ScalarType dtype, bool sum_may_overflow);

  double before = 1;
  double after = 1;
};

/// Divides in place; nothing for 1. Integers round toward zero.
void divide_(const at::Tensor& tensor, double by);

} // namespace fsdp
