#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::optim {

/// Host tensors whose elements lie side by side, in float32 or bfloat16: what `sum_of_squares` can do.
bool has_sum_of_squares(const at::Tensor& tensor);

/// Added up in float64, at the speed of memory. LibTorch's norms either add in float32, where the norm of a tensor and
/// that of its slices differ in the seventh digit, or convert the whole tensor first, which takes twenty times as long.
double sum_of_squares(const at::Tensor& tensor);

} // namespace fsdp::optim
