#include "layout/flat_layout.h"

#include <algorithm>

namespace fsdp::layout {

FlatLayout::FlatLayout(std::vector<int64_t> numels, int ranks) : ranks_(ranks), offsets_{0} {
  for (int64_t numel : numels) {
    offsets_.push_back(offsets_.back() + numel);
  }
  chunk_ = (offsets_.back() + ranks - 1) / ranks;
}

Range FlatLayout::within_parameter(size_t parameter, int rank) const {
  const int64_t first = offsets_[parameter], last = offsets_[parameter + 1];
  const int64_t begin = std::clamp(chunk_ * rank, first, last);
  const int64_t end = std::clamp(chunk_ * (rank + 1), first, last);
  return {begin - first, end - begin};
}

Range FlatLayout::within_share(size_t parameter, int rank) const {
  const Range range = within_parameter(parameter, rank);
  return {range.length == 0 ? 0 : offsets_[parameter] + range.begin - chunk_ * rank, range.length};
}

} // namespace fsdp::layout
