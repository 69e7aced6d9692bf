#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::engine {

/// Before `tensor` is given this data: an error if that is a copy of a shard, and the tensor is as large as the whole.
void check_is_no_piece(const at::TensorBase& tensor, const at::TensorBase& data);

} // namespace fsdp::engine
