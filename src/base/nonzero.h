#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

namespace fsdp {

/// An element that is neither 0 nor -0, counted in the order of memory: the largest of the first few, if not all of
/// these are zero, else of the next few. None if all are. Of dense floating-point numbers on the CPU.
std::optional<int64_t> nonzero_element(const at::Tensor& tensor);

} // namespace fsdp
