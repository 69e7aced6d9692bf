#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::layout {

/// Part of a one-dimensional tensor.
struct Range {
  int64_t begin = 0;
  int64_t length = 0;
};

/// Many parameters laid one after another in one flat parameter, padded at its end so that every rank gets the same
/// number of elements. A rank's share begins and ends anywhere in a parameter. Immutable.
class FlatLayout {
 public:
  FlatLayout(std::vector<int64_t> numels, int ranks);

  /// With the padding.
  int64_t numel() const {
    return chunk_ * ranks_;
  }
  int64_t padding() const {
    return numel() - offsets_.back();
  }
  int64_t chunk() const {
    return chunk_;
  }
  /// Where a parameter begins in the flat one.
  int64_t offset(size_t parameter) const {
    return offsets_[parameter];
  }
  /// What a rank holds of a parameter, counted from the parameter's beginning.
  Range within_parameter(size_t parameter, int rank) const;
  /// The same elements, counted from the beginning of the rank's share.
  Range within_share(size_t parameter, int rank) const;

 private:
  int ranks_;
  std::vector<int64_t> offsets_; // one more than parameters: the last is their sum
  int64_t chunk_;
};

} // namespace fsdp::layout
