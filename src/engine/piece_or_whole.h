#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::engine {

/// Before `tensor` is given this data: an error if that is a copy of a shard, and the tensor is as large as the whole.
void check_is_no_piece(const at::TensorBase& tensor, const at::TensorBase& data);

/// Data that a handle's tensor is given are values of the whole. False if they are not, and have to be taken as data.
bool give_values(const at::Tensor& handle, const at::Tensor& data);

} // namespace fsdp::engine
