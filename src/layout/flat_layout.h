#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <fsdp/cut.h>

namespace fsdp::layout {

/// Many parameters laid one after another in one flat parameter, padded at its end so that every rank gets the same
/// number of elements. A rank's share begins and ends anywhere in a parameter. Immutable.
class FlatLayout {
 public:
  /// `alignment`: elements of which each parameter's beginning is a multiple.
  FlatLayout(std::vector<int64_t> numels, int ranks, int64_t alignment = 1);

  /// With the padding.
  int64_t numel() const {
    return chunk_ * ranks_;
  }
  /// At the end.
  int64_t padding() const {
    return numel() - end_;
  }
  int64_t chunk() const {
    return chunk_;
  }
  Cut cut(size_t parameter) const {
    return {numels_[parameter], chunk_, offsets_[parameter]};
  }

 private:
  int ranks_;
  std::vector<int64_t> numels_, offsets_;
  int64_t end_ = 0; // of the last parameter
  int64_t chunk_;
};

} // namespace fsdp::layout
