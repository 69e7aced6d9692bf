#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace fsdp::engine {

/// Copies values into a tensor. One that has been expanded, whose elements are one, gets memory for all of them.
inline void write_values(const at::Tensor& to, const at::Tensor& values) {
  if (at::has_internal_overlap(to) == at::MemOverlap::Yes) {
    to.set_data(at::empty(to.sizes(), to.options()).copy_(values)); // which may be this tensor
  }
  to.copy_(values);
}

} // namespace fsdp::engine
