#include "layout/param_layout.h"

#include <algorithm>
#include <numeric>

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include "base/view_into.h"

namespace fsdp::layout {

bool is_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return strides[a] < strides[b]; });
  int64_t expected = 1;
  for (size_t d : order) {
    if (sizes[d] == 0) {
      return true;
    }
    if (sizes[d] != 1 && strides[d] != expected) {
      return false;
    }
    expected *= sizes[d];
  }
  return true;
}

std::vector<int64_t> contiguous_strides(c10::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t next = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = next;
    next *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

std::vector<Cut> flat_cuts(const std::vector<int64_t>& numels, int ranks, int64_t alignment) {
  std::vector<Cut> cuts;
  int64_t end = 0; // of the last parameter
  for (const int64_t numel : numels) {
    const int64_t before = (end + alignment - 1) / alignment * alignment;
    cuts.push_back({numel, /*chunk=*/0, before});
    end = before + numel;
  }
  for (Cut& cut : cuts) {
    cut.chunk = (end + ranks - 1) / ranks;
  }
  return cuts;
}

ParamLayout::ParamLayout(std::vector<int64_t> sizes, std::vector<int64_t> strides, int64_t dim, int ranks)
    : dim_(dim), ranks_(ranks), sizes_(std::move(sizes)), strides_(std::move(strides)) {
  TORCH_INTERNAL_ASSERT(is_dense(sizes_, strides_));
  TORCH_INTERNAL_ASSERT(ranks >= 1 && dim >= 0 && (sizes_.empty() || dim < static_cast<int64_t>(sizes_.size())));
  const int64_t numel = c10::multiply_integers(sizes_);
  all_rows_ = sizes_.empty() ? 1 : sizes_[dim_];
  row_numel_ = all_rows_ == 0 ? 0 : numel / all_rows_;
  chunk_rows_ = (all_rows_ + ranks - 1) / ranks;
  cut_ = {numel, chunk_rows_ * row_numel_};
  // Rows lie one after another exactly when no other dimension steps further than the one that is cut.
  const bool rows_adjacent = sizes_.empty() || all_rows_ <= 1 || numel == 0 || strides_[dim_] == row_numel_;
  in_place_ = ranks == 1 || rows_adjacent;
}

ParamLayout::ParamLayout(std::vector<int64_t> sizes, std::vector<int64_t> strides, Cut part_of_flat, int ranks)
    : ranks_(ranks), flat_(true), cut_(part_of_flat), sizes_(std::move(sizes)), strides_(std::move(strides)) {
  TORCH_INTERNAL_ASSERT(is_dense(sizes_, strides_) && cut_.numel == c10::multiply_integers(sizes_));
}

int64_t ParamLayout::first_row(int rank) const {
  return std::min(chunk_rows_ * rank, all_rows_);
}

int64_t ParamLayout::rows(int rank) const {
  return first_row(rank + 1) - first_row(rank);
}

std::vector<int64_t> ParamLayout::shard_sizes(int rank) const {
  if (flat_) {
    return ranks_ == 1 ? sizes_ : std::vector<int64_t>{cut_.length(rank)};
  }
  if (sizes_.empty()) {
    return rank == 0 ? sizes_ : std::vector<int64_t>{0};
  }
  std::vector<int64_t> result = sizes_;
  result[dim_] = rows(rank);
  return result;
}

std::vector<int64_t> ParamLayout::shard_strides(int rank) const {
  const bool keep = ranks_ == 1 || (!flat_ && in_place_ && !sizes_.empty());
  return keep ? strides_ : contiguous_strides(shard_sizes(rank));
}

Extent ParamLayout::extent(int rank) const {
  return flat_ ? Extent::one_run(cut_.begin(rank), cut_.length(rank))
               : Extent::of_rows(sizes_, strides_, dim_, first_row(rank), rows(rank));
}

template <typename Copy>
void ParamLayout::for_each_block(const at::Tensor& slices, const at::Tensor& whole, const Copy& copy) const {
  const int64_t full = chunk_rows_ == 0 ? 0 : all_rows_ / chunk_rows_; // ranks that hold a full shard
  const auto block = [&](int64_t first, int64_t ranks, int64_t rows) {
    if (ranks * rows * row_numel_ == 0) {
      return;
    }
    std::vector<int64_t> sizes = sizes_, strides = strides_;
    sizes[dim_] = rows;
    std::vector<int64_t> packed = contiguous_strides(sizes);
    sizes.insert(sizes.begin(), ranks);
    strides.insert(strides.begin(), chunk_rows_ * strides_[dim_]);
    packed.insert(packed.begin(), cut_.chunk);
    const int64_t offset = first * chunk_rows_;
    copy(
        view_into(slices, slices.scalar_type(), sizes, packed, offset * row_numel_),
        view_into(whole, whole.scalar_type(), sizes, strides, offset * strides_[dim_]));
  };
  block(0, full, chunk_rows_);
  block(full, 1, all_rows_ - full * chunk_rows_);
}

at::Tensor ParamLayout::unpack(const at::Tensor& slices) const {
  auto whole = at::empty_strided(sizes_, strides_, slices.options());
  if (in_place_) {
    at::as_strided(whole, {numel()}, {1}).copy_(slices);
  } else {
    for_each_block(slices, whole, [](const at::Tensor& from, const at::Tensor& to) { to.copy_(from); });
  }
  return whole;
}

at::Tensor ParamLayout::pack(const at::Tensor& whole) const {
  auto slices = at::empty({numel()}, whole.options());
  for_each_block(slices, whole, [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
  return slices;
}

} // namespace fsdp::layout
