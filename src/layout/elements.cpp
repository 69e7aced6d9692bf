#include "layout/elements.h"

#include <algorithm>
#include <numeric>

#include <ATen/ops/empty_strided.h>
#include <c10/util/accumulate.h>

#include "layout/param_layout.h"

namespace fsdp::layout {

namespace {

bool lie_alike(const PieceOfWhole& a, const PieceOfWhole& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d) {
    if (a.sizes[d] > 1 && a.strides[d] != b.strides[d]) {
      return false;
    }
  }
  return true;
}

bool is_whole(const PieceOfWhole& piece) {
  return piece.extent.numel() == c10::multiply_integers(piece.sizes);
}

at::Tensor flat(const PieceOfWhole& piece) {
  return in_memory_order(piece).reshape({-1}).contiguous(); // which a view of a single dimension need not be
}

at::Tensor whole_in_order_of(const PieceOfWhole& want, const PieceOfWhole& have) {
  auto whole = at::empty_strided(want.sizes, want.strides, have.tensor.options());
  whole.copy_(have.tensor.view(want.sizes));
  return whole.as_strided({whole.numel()}, {1});
}

} // namespace

at::Tensor in_memory_order(const PieceOfWhole& piece) {
  if (piece.tensor.dim() != static_cast<int64_t>(piece.sizes.size())) {
    return piece.tensor; // a run of elements
  }
  std::vector<int64_t> dims(piece.sizes.size());
  std::iota(dims.begin(), dims.end(), 0);
  std::stable_sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return piece.strides[a] > piece.strides[b]; });
  return piece.tensor.permute(dims);
}

bool covers(const PieceOfWhole& have, const PieceOfWhole& want) {
  if (!lie_alike(have, want)) {
    return is_whole(have) || want.extent.numel() == 0;
  }
  int64_t covered = 0;
  for (const auto& run : overlap(have.extent, want.extent)) {
    covered += run.length;
  }
  return covered == want.extent.numel();
}

at::Tensor taken_from(const PieceOfWhole& have, const PieceOfWhole& want) {
  const bool alike = lie_alike(have, want);
  if (alike && have.extent == want.extent && have.tensor.sizes() == want.tensor.sizes()) {
    return have.tensor;
  }
  const at::Tensor from = alike ? flat(have) : whole_in_order_of(want, have);
  const at::Tensor to = flat(want).clone();
  const Extent& wanted = want.extent;
  if (is_whole(have)) {
    to.copy_(from.as_strided({wanted.count, wanted.run}, {wanted.stride, 1}, from.storage_offset() + wanted.first)
                 .reshape({-1}));
  } else {
    for (const auto& run : overlap(have.extent, wanted)) {
      to.narrow(0, run.to, run.length).copy_(from.narrow(0, run.from, run.length));
    }
  }
  at::Tensor result = want.tensor.clone(); // which lies as the wanted tensor does
  PieceOfWhole there{want.sizes, want.strides, want.extent, result};
  at::Tensor ordered = in_memory_order(there);
  ordered.copy_(to.view(ordered.sizes()));
  return result;
}

} // namespace fsdp::layout
