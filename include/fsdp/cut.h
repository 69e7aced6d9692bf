#pragma once

#include <algorithm>
#include <cstdint>

namespace fsdp {

/// How one tensor is cut among the ranks of a group: rank r keeps what lies in [r * chunk, (r + 1) * chunk) of it, or
/// of what it is a part of: tensors that lie one after another, and are cut as one.
struct Cut {
  int64_t numel; ///< of the whole tensor
  int64_t chunk; ///< of a full share; trailing ranks may hold less, or nothing
  int64_t before = 0; ///< elements that lie before it in what is cut

  /// What rank r keeps, counted from the tensor's beginning.
  int64_t begin(int rank) const {
    return std::clamp<int64_t>(chunk * rank - before, 0, numel);
  }
  int64_t length(int rank) const {
    return begin(rank + 1) - begin(rank);
  }
  /// Where that begins in rank r's share of what is cut.
  int64_t offset(int rank) const {
    return std::max<int64_t>(0, before - chunk * rank);
  }
};

/// A unit's parameters are cut as one, laid one after another, and not each along a dimension.
struct FlatCut {
  int64_t alignment = 1; ///< bytes, of a multiple of which each parameter begins, in the dtype that it is gathered in
  bool shown_as_one = false; ///< users see one flat shard; nothing is put in the parameters' places
};

} // namespace fsdp
