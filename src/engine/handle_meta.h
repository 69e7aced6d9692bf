#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::engine {

/// From now on `handle.grad()` is there as long as the shard has a gradient: whoever drops the gradients of
/// `parameters()` does not come by here. Nothing for a tensor with a history.
void show_gradient_while_shard_has_one(const at::Tensor& handle);

} // namespace fsdp::engine
