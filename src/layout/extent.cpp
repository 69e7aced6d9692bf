#include <fsdp/extent.h>

#include <algorithm>

#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

namespace fsdp {

namespace {

/// The runs of an extent, one at a time.
class Runs {
 public:
  explicit Runs(const Extent& extent) : extent_(extent) {}

  bool ended() const {
    return index_ >= extent_.count;
  }
  int64_t begin() const {
    return extent_.first + index_ * extent_.stride;
  }
  int64_t end() const {
    return begin() + extent_.run;
  }
  /// Of an element of this run, among all of the extent.
  int64_t place(int64_t element) const {
    return index_ * extent_.run + element - begin();
  }
  /// To the next, or further: nothing before `element` is of interest.
  void go_on(int64_t element) {
    index_ = std::max(index_ + 1, (element - extent_.first) / extent_.stride);
  }

 private:
  const Extent& extent_;
  int64_t index_ = 0;
};

void add(std::vector<OverlapRun>& runs, const OverlapRun& next) {
  if (!runs.empty() && runs.back().from + runs.back().length == next.from &&
      runs.back().to + runs.back().length == next.to) {
    runs.back().length += next.length;
  } else {
    runs.push_back(next);
  }
}

} // namespace

Extent Extent::one_run(int64_t first, int64_t numel) {
  return numel == 0 ? Extent() : Extent{first, numel, numel, 1};
}

Extent Extent::of_rows(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t dim, int64_t first_row, int64_t rows) {
  const int64_t numel = c10::multiply_integers(sizes);
  if (rows == 0 || numel == 0) {
    return {};
  }
  if (sizes.empty() || rows == sizes[dim]) {
    return one_run(0, numel);
  }
  const int64_t inner = strides[dim], stride = sizes[dim] * inner;
  const int64_t count = numel / stride;
  TORCH_INTERNAL_ASSERT(first_row + rows <= sizes[dim] && count * stride == numel);
  const int64_t run = rows * inner;
  return {first_row * inner, run, count == 1 ? run : stride, count};
}

std::vector<OverlapRun> overlap(const Extent& have, const Extent& want) {
  std::vector<OverlapRun> runs;
  Runs from(have), to(want);
  while (!from.ended() && !to.ended()) {
    const int64_t begin = std::max(from.begin(), to.begin()), end = std::min(from.end(), to.end());
    if (begin < end) {
      add(runs, {from.place(begin), to.place(begin), end - begin});
    }
    Runs& shorter = from.end() <= to.end() ? from : to;
    shorter.go_on(std::max(from.begin(), to.begin()));
  }
  return runs;
}

} // namespace fsdp
