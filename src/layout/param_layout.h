#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/cut.h>
#include <fsdp/extent.h>

namespace fsdp::layout {

/// How one parameter is cut. Either along one dimension, as `torch.chunk` cuts: every rank gets ceil(size / ranks)
/// rows, the last ranks less or nothing, and a 0-dim parameter belongs to rank 0. Or as a part of a flat parameter:
/// every rank gets a run of elements, in the order in which they lie in memory. Immutable.
///
/// "Slices" is the one-dimensional tensor of all ranks' shards, one after another; it has as many elements as the
/// parameter.
class ParamLayout {
 public:
  /// `strides` must be dense (some permutation of contiguous).
  ParamLayout(std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t dim, int ranks);
  ParamLayout(std::vector<int64_t> sizes, std::vector<int64_t> strides, Cut part_of_flat, int ranks);

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
    return cut_.numel;
  }
  /// Of the slices.
  const Cut& cut() const {
    return cut_;
  }
  bool is_part_of_flat() const {
    return flat_;
  }
  std::vector<int64_t> shard_sizes(int rank) const;
  std::vector<int64_t> shard_strides(int rank) const;
  /// Of the whole, what a rank's shard has.
  Extent extent(int rank) const;

  /// The slices are the parameter's own memory: gathering them is all there is to do.
  bool in_place() const {
    return in_place_;
  }
  /// Copies slices into a new whole parameter, and the other way round: two operators, however many ranks.
  at::Tensor unpack(const at::Tensor& slices) const;
  at::Tensor pack(const at::Tensor& whole) const;

 private:
  /// Full shards of all ranks that have one, then the last rank's; `copy` gets both tensors' views of them.
  template <typename Copy>
  void for_each_block(const at::Tensor& slices, const at::Tensor& whole, const Copy& copy) const;
  int64_t first_row(int rank) const;
  int64_t rows(int rank) const;

  int64_t dim_ = 0;
  int ranks_;
  bool flat_ = false;
  bool in_place_ = true;
  Cut cut_;
  // Where it is cut along a dimension.
  int64_t all_rows_ = 0;
  int64_t row_numel_ = 0;
  int64_t chunk_rows_ = 0;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
};

/// Many parameters laid one after another in one flat parameter, padded at its end so that every rank gets the same
/// number of elements. A rank's share begins and ends anywhere in a parameter.
/// `alignment`: elements of which each parameter's beginning is a multiple.
std::vector<Cut> flat_cuts(const std::vector<int64_t>& numels, int ranks, int64_t alignment = 1);

/// True for a permutation of contiguous strides: no gaps, no overlap.
bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides);
std::vector<int64_t> contiguous_strides(c10::IntArrayRef sizes);

} // namespace fsdp::layout
