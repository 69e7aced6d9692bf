#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::disk {

/// Elements as their bytes come into a file: on the CPU, side by side, and not seen through a view that conjugates or
/// negates them.
inline at::Tensor stored(const at::Tensor& elements) {
  return elements.to(c10::kCPU).resolve_conj().resolve_neg().contiguous();
}

} // namespace fsdp::disk
