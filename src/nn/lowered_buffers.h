#pragma once

#include <ATen/core/Tensor.h>

/// Buffers that have a dtype to compute in, and are saved in the one that they had before. Thread safe.
namespace fsdp::nn::lowered_buffers {

void lower(const at::Tensor& buffer, c10::ScalarType dtype);
/// Gives a buffer the dtype in which it is saved.
void restore(const at::Tensor& buffer);
/// The one that it had before it was lowered first; of all others, their own.
c10::ScalarType saved_dtype(const at::Tensor& buffer);

} // namespace fsdp::nn::lowered_buffers
