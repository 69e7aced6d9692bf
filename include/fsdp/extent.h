#pragma once

#include <cstdint>
#include <vector>

#include <c10/util/ArrayRef.h>

#include <fsdp/export.h>

namespace fsdp {

/// Which elements of a whole tensor a rank has, counted in the order in which they lie in the whole's memory: `count`
/// runs of `run` elements. That covers all cuts: rows of any dimension, in whatever memory order, and a part of a flat
/// parameter. Equal extents are equal values: nothing is {0, 0, 0, 0}, and what is one run has its length as stride.
struct FSDP_API Extent {
  int64_t first = 0; ///< where the first run begins
  int64_t run = 0;
  int64_t stride = 0; ///< from the beginning of one run to that of the next
  int64_t count = 0;

  static Extent one_run(int64_t first, int64_t numel);
  static Extent of_rows(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t dim, int64_t first_row, int64_t rows);

  int64_t numel() const {
    return run * count;
  }
  bool operator==(const Extent&) const = default;
};

/// Elements that two extents share, which lie side by side in both: places among the elements of each.
struct OverlapRun {
  int64_t from = 0; ///< among those that there are
  int64_t to = 0; ///< among those that are wanted
  int64_t length = 0;
  bool operator==(const OverlapRun&) const = default;
};

/// What there is of what is wanted, of one whole, in as few runs as possible and in their order.
FSDP_API std::vector<OverlapRun> overlap(const Extent& have, const Extent& want);

} // namespace fsdp
