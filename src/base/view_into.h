#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

/// A tensor over a part of the memory of another, `offset` elements after its first. ATen's views go through the
/// dispatcher, which takes longer than most of what the engine then does with them.
inline at::Tensor view_into(
    const at::Tensor& base, c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), c10::scalarTypeToTypeMeta(dtype));
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t begin = base.storage_offset() * base.element_size() / size;
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, begin + offset);
  return view;
}

/// The same, with one dimension.
inline at::Tensor view_into(const at::Tensor& base, c10::ScalarType dtype, int64_t numel, int64_t offset = 0) {
  return view_into(base, dtype, {numel}, {1}, offset);
}

} // namespace fsdp
