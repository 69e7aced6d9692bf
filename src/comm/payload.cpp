#include "comm/payload.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <c10/core/ScalarType.h>

namespace fsdp {
namespace {

constexpr int64_t kWholeAlignment = 64; // as torch's own allocations: kernels are chosen by alignment

c10::ScalarType dtype_of(const Piece& piece, PieceDtype which) {
  return which == PieceDtype::kStored ? piece.stored : piece.gathered;
}

int64_t item_bytes(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

std::vector<size_t> by_dtype(const std::vector<Piece>& pieces, PieceDtype which) {
  std::vector<size_t> order(pieces.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::erase_if(order, [&](size_t i) { return pieces[i].chunk == 0; });
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const auto first = dtype_of(pieces[a], which);
    const auto second = dtype_of(pieces[b], which);
    return std::pair(-item_bytes(first), first) < std::pair(-item_bytes(second), second);
  });
  return order;
}

} // namespace

int64_t align_up(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

Payload::Payload(const std::vector<Piece>& pieces, PieceDtype dtype)
    : slots_(pieces.size()), order_(by_dtype(pieces, dtype)) {
  const Piece* previous = nullptr;
  for (const size_t i : order_) {
    const Piece& piece = pieces[i];
    if (previous && dtype_of(*previous, dtype) != dtype_of(piece, dtype)) {
      bytes_ = align_up(bytes_, kSendAlignment);
    }
    slots_[i] = {bytes_, piece.chunk * item_bytes(dtype_of(piece, dtype)), piece.holders()};
    bytes_ += slots_[i].bytes;
    previous = &piece;
  }
  bytes_ = align_up(bytes_, kSendAlignment);
}

WholePieces::WholePieces(const std::vector<Piece>& pieces, int size) {
  for (const Piece& piece : pieces) {
    offsets_.push_back(bytes_);
    bytes_ = align_up(bytes_ + piece.chunk * size * item_bytes(piece.gathered), kWholeAlignment);
  }
}

} // namespace fsdp
