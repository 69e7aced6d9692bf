#include "comm/c10d/rank_major.h"

#include <algorithm>
#include <cstring>

#include <ATen/ops/_chunk_cat.h>

#include "comm/c10d/copy_each.h"
#include "comm/c10d/payload.h"

namespace fsdp::adapter {
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
  matrix.device().is_cpu() ? pack_on_host(args, matrix) : pack_on_device(args, matrix);
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

bool RankMajor::cuts_as_chunk_does(const ReduceScatter& args) const {
  for (size_t i = 0; i < args.wholes.size(); ++i) {
    const int64_t numel = args.wholes[i].numel();
    if (numel == 0 || args.chunks[i] != (numel + size_ - 1) / size_) {
      return false;
    }
  }
  return offsets_.back() + args.chunks.back() == row_;
}

void RankMajor::pack_on_device(const ReduceScatter& args, const at::Tensor& matrix) const {
  at::Tensor rows = matrix.view({size_, row_});
  std::vector<at::Tensor> flat;
  for (const at::Tensor& whole : args.wholes) {
    flat.push_back(whole.view({-1}));
  }
  if (cuts_as_chunk_does(args)) {
    at::_chunk_cat_out(rows, flat, /*dim=*/0, size_); // one kernel
    return;
  }
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> targets;
  const auto pieces = pieces_of(args);
  for (size_t i = 0; i < flat.size(); ++i) {
    const Piece& piece = pieces[i];
    for (int rank = 0; rank < size_ && piece.length(rank) > 0; ++rank) {
      sources.push_back(flat[i].narrow(0, piece.begin(rank), piece.length(rank)));
      targets.push_back(rows[rank].narrow(0, offsets_[i], piece.length(rank)));
    }
  }
  copy_each(targets, sources);
}

} // namespace fsdp::adapter
