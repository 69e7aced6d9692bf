#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::disk {

/// What a tensor is now, whatever operators write to it later: the first of these gives the tensor memory of its own,
/// and from then on what had its address writes to the snapshot. Undefined unless it has memory that the CPU's
/// allocator has given to it alone: what is shared, mapped or pinned is to be copied.
at::Tensor snapshot_of(const at::Tensor& tensor);

} // namespace fsdp::disk
