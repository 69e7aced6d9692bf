#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/extent.h>

/// Tensors as the elements that extents speak of.
namespace fsdp::layout {

/// A tensor that has been cut from a whole, and what has to be known of that.
struct PieceOfWhole {
  c10::IntArrayRef sizes, strides; ///< of the whole; dense
  const Extent& extent;
  at::Tensor tensor;
};

/// A view of the piece, its elements in the order of its extent.
at::Tensor in_memory_order(const PieceOfWhole& piece);

/// Whether all that is wanted is there.
bool covers(const PieceOfWhole& have, const PieceOfWhole& want);
/// The wanted piece with the values that there are: sizes and dtype as those of `want.tensor`, whose own values are
/// kept where there are no others. Wholes may lie in memory in another order, pieces of them not.
at::Tensor taken_from(const PieceOfWhole& have, const PieceOfWhole& want);

} // namespace fsdp::layout
