#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace fsdp::layout {

/// How one parameter is cut along one dimension, as `torch.chunk` cuts: every rank gets ceil(size / ranks) rows, the
/// last ranks less or nothing. A 0-dim parameter belongs to rank 0. Immutable.
///
/// "Slices" is the one-dimensional tensor of all ranks' shards, one after another; it has as many elements as the
/// parameter.
class DimLayout {
 public:
  /// `strides` must be dense (some permutation of contiguous).
  DimLayout(std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t dim, int ranks);

  const std::vector<int64_t>& sizes() const {
    return sizes_;
  }
  const std::vector<int64_t>& strides() const {
    return strides_;
  }
  int64_t dim() const {
    return dim_;
  }
  int64_t numel() const {
    return numel_;
  }
  /// Elements of a full shard.
  int64_t chunk() const {
    return chunk_rows_ * row_numel_;
  }
  /// Where a rank's shard begins in the slices, and its length.
  int64_t begin(int rank) const;
  int64_t length(int rank) const;
  std::vector<int64_t> shard_sizes(int rank) const;
  std::vector<int64_t> shard_strides(int rank) const;

  /// The slices are the parameter's own memory: gathering them is all there is to do.
  bool in_place() const {
    return in_place_;
  }
  /// Copies slices into the whole parameter, and the other way round: two operators, however many ranks.
  void unpack(const at::Tensor& slices, const at::Tensor& whole) const;
  at::Tensor pack(const at::Tensor& whole) const;

 private:
  /// Full shards of all ranks that have one, then the last rank's; `copy` gets both tensors' views of them.
  template <typename Copy>
  void for_each_block(const at::Tensor& slices, const at::Tensor& whole, const Copy& copy) const;
  int64_t first_row(int rank) const;
  int64_t rows(int rank) const;

  int64_t dim_;
  int ranks_;
  bool in_place_;
  int64_t numel_;
  int64_t all_rows_;
  int64_t row_numel_;
  int64_t chunk_rows_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
};

/// True for a permutation of contiguous strides: no gaps, no overlap.
bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides);
std::vector<int64_t> contiguous_strides(c10::IntArrayRef sizes);

} // namespace fsdp::layout
