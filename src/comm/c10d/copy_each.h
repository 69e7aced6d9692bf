#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>

namespace fsdp::adapter {

/// Copies each source to its target, with few kernels. The operator itself does not take empty lists.
inline void copy_each(const std::vector<at::Tensor>& targets, const std::vector<at::Tensor>& sources) {
  if (!targets.empty()) {
    at::_foreach_copy_(targets, sources);
  }
}

} // namespace fsdp::adapter
