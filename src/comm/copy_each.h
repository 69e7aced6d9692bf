#pragma once

#include <cstring>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>

#include "base/view_into.h"

namespace fsdp {

/// Copies each source to its target, with few kernels. The operator itself does not take empty lists.
inline void copy_each(const std::vector<at::Tensor>& targets, const std::vector<at::Tensor>& sources) {
  if (!targets.empty()) {
    at::_foreach_copy_(targets, sources);
  }
}

/// Copies to each target what begins at its place in `row`, which has one dimension and the targets' dtype.
inline void copy_out(
    const at::Tensor& row, const std::vector<int64_t>& begins, const std::vector<at::Tensor>& targets) {
  if (!row.device().is_cpu()) {
    std::vector<at::Tensor> sources;
    for (size_t i = 0; i < targets.size(); ++i) {
      sources.push_back(view_into(row, row.scalar_type(), targets[i].sizes(), targets[i].strides(), begins[i]));
    }
    copy_each(targets, sources);
    return;
  }
  const char* const from = static_cast<const char*>(row.const_data_ptr());
  for (size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].numel() > 0) { // an empty one has no address
      std::memcpy(targets[i].mutable_data_ptr(), from + begins[i] * row.element_size(), targets[i].nbytes());
    }
  }
}

} // namespace fsdp
