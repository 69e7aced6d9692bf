#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

namespace fsdp {

/// A tensor over memory that somebody else keeps, on the device of the options, which has its index. Nobody asks the
/// device whose memory it is: without elements it may be nobody's.
inline at::Tensor tensor_at(
    void* memory, c10::IntArrayRef sizes, at::OptionalIntArrayRef strides, const at::TensorOptions& options) {
  return at::for_blob(memory, sizes).strides(strides).options(options).target_device(options.device()).make_tensor();
}
inline at::Tensor tensor_at(void* memory, c10::IntArrayRef sizes, const at::TensorOptions& options) {
  return tensor_at(memory, sizes, std::nullopt, options);
}

} // namespace fsdp
