#include "comm/rank_major.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/zeros.h>

#include "base/view_into.h"

#include "comm/copy_each.h"
#include "comm/payload.h"

namespace fsdp {
namespace {

std::vector<Piece> pieces_of(const ReduceScatter& args) {
  std::vector<Piece> pieces;
  pieces.reserve(args.wholes.size());
  for (size_t i = 0; i < args.wholes.size(); ++i) {
    const auto dtype = args.wholes[i].scalar_type();
    pieces.push_back({.numel = args.wholes[i].numel(), .chunk = args.chunks[i], .stored = dtype, .gathered = dtype});
  }
  return pieces;
}

} // namespace

RankMajor::RankMajor(const ReduceScatter& args, int size) : size_(size) {
  for (const int64_t chunk : args.chunks) {
    offsets_.push_back(row_);
    row_ += chunk;
  }
  if (row_ > 0) {
    row_ = align_up(row_, std::max<int64_t>(1, kSendAlignment / args.wholes.front().element_size()));
  }
}

at::Tensor RankMajor::as_it_is(const ReduceScatter& args) const {
  const bool matches = args.wholes.size() == 1 && args.wholes[0].numel() == row_ * size_;
  return matches ? args.wholes[0].view({-1}) : at::Tensor();
}

void RankMajor::pack(const ReduceScatter& args, const at::Tensor& matrix) const {
  matrix.device().is_cpu() ? pack_on_host(args, matrix) : pack_by_operators(args, matrix);
}

void RankMajor::pack_on_host(const ReduceScatter& args, const at::Tensor& matrix) const {
  const int64_t item = matrix.element_size(), row_bytes = row_ * item;
  char* const base = static_cast<char*>(matrix.mutable_data_ptr());
  const auto pieces = pieces_of(args);
  int holders = 0;
  for (const Piece& piece : pieces) {
    holders = std::max(holders, piece.holders());
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    const int64_t next = i + 1 < pieces.size() ? offsets_[i + 1] : row_;
    const int64_t width = (next - offsets_[i]) * item, chunk = pieces[i].chunk * item;
    int64_t left = pieces[i].numel * item;
    const char* from = left > 0 ? static_cast<const char*>(args.wholes[i].const_data_ptr()) : nullptr;
    char* to = base + offsets_[i] * item;
    for (int rank = 0; rank < holders; ++rank, to += row_bytes) {
      const int64_t bytes = std::min(chunk, left);
      if (bytes > 0) { // an empty tensor has no address
        std::memcpy(to, from, bytes);
        from += bytes;
        left -= bytes;
      }
      if (bytes < width) {
        std::memset(to + bytes, 0, width - bytes);
      }
    }
  }
  std::memset(base + holders * row_bytes, 0, (size_ - holders) * row_bytes);
}

// Any divisor of the elements and the chunk may be taken for the length of a row; the greatest makes the fewest rows.
std::vector<at::Tensor> RankMajor::columns(const ReduceScatter& args) const {
  std::vector<at::Tensor> columns;
  for (size_t i = 0; i < args.wholes.size(); ++i) {
    const at::Tensor& whole = args.wholes[i];
    const int64_t chunk = args.chunks[i];
    if (chunk == 0) {
      continue;
    }
    const int64_t length = std::gcd(whole.numel(), chunk), rows = whole.numel() / length;
    if (rows == 0 || (rows + size_ - 1) / size_ != chunk / length) {
      return {};
    }
    columns.push_back(view_into(whole, whole.scalar_type(), {rows, length}, {length, 1}, 0));
  }
  if (padding(args) > 0) {
    columns.push_back(at::zeros({1, padding(args)}, columns.front().options()));
  }
  return columns;
}

void RankMajor::pack_by_operators(const ReduceScatter& args, const at::Tensor& matrix) const {
  const auto dtype = matrix.scalar_type();
  if (const auto chunked = columns(args); !chunked.empty()) {
    at::Tensor rows = view_into(matrix, dtype, {size_, row_}, {row_, 1}, 0);
    at::_chunk_cat_out(rows, chunked, /*dim=*/0, size_);
    return;
  }
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> targets;
  for (size_t i = 0; i < args.wholes.size(); ++i) {
    const at::Tensor& whole = args.wholes[i];
    const int64_t chunk = args.chunks[i], full = chunk == 0 ? 0 : whole.numel() / chunk;
    const auto copy = [&](int64_t first, int64_t ranks, int64_t length) {
      if (ranks * length > 0) {
        sources.push_back(view_into(whole, dtype, {ranks, length}, {chunk, 1}, first * chunk));
        targets.push_back(view_into(matrix, dtype, {ranks, length}, {row_, 1}, first * row_ + offsets_[i]));
      }
    };
    copy(0, full, chunk);
    copy(full, 1, whole.numel() - full * chunk);
  }
  matrix.zero_();
  copy_each(targets, sources);
}

} // namespace fsdp
