#include "layout/flat_layout.h"

#include <utility>

namespace fsdp::layout {

FlatLayout::FlatLayout(std::vector<int64_t> numels, int ranks, int64_t alignment)
    : ranks_(ranks), numels_(std::move(numels)) {
  for (const int64_t numel : numels_) {
    offsets_.push_back((end_ + alignment - 1) / alignment * alignment);
    end_ = offsets_.back() + numel;
  }
  chunk_ = (end_ + ranks - 1) / ranks;
}

} // namespace fsdp::layout
