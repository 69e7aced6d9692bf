#include "checkpoint/covers.h"

#include <algorithm>

namespace fsdp::disk {

bool covers(const IndexedTensor& tensor, const Extent& want) {
  std::vector<OverlapRun> runs;
  for (const auto& piece : tensor.pieces) {
    const auto more = overlap(piece.extent, want);
    runs.insert(runs.end(), more.begin(), more.end());
    if (static_cast<int64_t>(runs.size()) > want.numel()) {
      return false; // some twice
    }
  }
  std::sort(runs.begin(), runs.end(), [](const auto& a, const auto& b) { return a.to < b.to; });
  int64_t end = 0;
  for (const auto& run : runs) {
    if (run.to != end) {
      return false;
    }
    end += run.length;
  }
  return end == want.numel();
}

} // namespace fsdp::disk
