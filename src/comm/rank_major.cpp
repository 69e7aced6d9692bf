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

// Elements [begin, end) of a strip, row by row: `each` gets a row, a column within the strip, and a length.
template <typename Each>
void for_each_row(int64_t begin, int64_t end, int64_t chunk, const Each& each) {
  while (begin < end) {
    const int64_t row = begin / chunk, column = begin - row * chunk, length = std::min(end - begin, chunk - column);
    each(row, column, length);
    begin += length;
  }
}

} // namespace

RankMajor::RankMajor(const ReduceScatter& args, int rank, int size) : size_(size) {
  for (size_t i = 0; i < args.cuts.size(); ++i) {
    const Cut& cut = args.cuts[i];
    const bool nothing_before = i > 0 && strips_.back().numel == 0 && strips_.back().chunk == cut.chunk;
    if (i == 0 || (cut.before == 0 && !nothing_before)) {
      strips_.push_back({row_, cut.chunk});
      row_ += cut.chunk;
    }
    Strip& strip = strips_.back();
    strip.last = i;
    strip.numel = cut.before + cut.numel;
    offsets_.push_back(strip.column + std::min(cut.offset(rank), cut.chunk));
  }
  if (row_ > 0) {
    const int64_t used = row_;
    row_ = align_up(row_, std::max<int64_t>(1, kSendAlignment / args.wholes.front().element_size()));
    padding_ = row_ - used;
  }
}

int64_t RankMajor::holders() const {
  int64_t holders = 0;
  for (const Strip& strip : strips_) {
    holders = std::max(holders, strip.chunk == 0 ? 0 : (strip.numel + strip.chunk - 1) / strip.chunk);
  }
  return holders;
}

at::Tensor RankMajor::as_it_is(const ReduceScatter& args) const {
  const bool matches = args.wholes.size() == 1 && args.wholes[0].numel() == row_ * size_;
  return matches ? args.wholes[0].view({-1}) : at::Tensor();
}

void RankMajor::pack(const ReduceScatter& args, const at::Tensor& matrix) const {
  matrix.device().is_cpu() ? pack_on_host(args, matrix) : pack_by_operators(args, matrix);
}

void RankMajor::pack_on_host(const ReduceScatter& args, const at::Tensor& matrix) const {
  const int64_t item = matrix.element_size(), row_bytes = row_ * item, holders = this->holders();
  char* const base = static_cast<char*>(matrix.mutable_data_ptr());
  size_t i = 0;
  for (const Strip& strip : strips_) {
    char* const column_of_strip = base + strip.column * item;
    const auto place = [&](int64_t row, int64_t column) { return column_of_strip + row * row_bytes + column * item; };
    const auto zero = [&](int64_t begin, int64_t end) {
      for_each_row(begin, end, strip.chunk, [&](int64_t row, int64_t column, int64_t length) {
        std::memset(place(row, column), 0, length * item);
      });
    };
    int64_t filled = 0;
    for (; i <= strip.last; ++i) {
      const Cut& cut = args.cuts[i];
      zero(filled, cut.before);
      filled = cut.before + cut.numel;
      const char* from = cut.numel > 0 ? static_cast<const char*>(args.wholes[i].const_data_ptr()) : nullptr;
      for_each_row(cut.before, filled, strip.chunk, [&](int64_t row, int64_t column, int64_t length) {
        std::memcpy(place(row, column), from, length * item);
        from += length * item;
      });
    }
    zero(filled, holders * strip.chunk);
  }
  for (int64_t row = 0; padding_ > 0 && row < holders; ++row) {
    std::memset(base + (row + 1) * row_bytes - padding_ * item, 0, padding_ * item);
  }
  std::memset(base + holders * row_bytes, 0, (size_ - holders) * row_bytes);
}

// Any divisor of the elements and the chunk may be taken for the length of a row; the greatest makes the fewest rows.
std::vector<at::Tensor> RankMajor::columns(const ReduceScatter& args) const {
  std::vector<at::Tensor> columns;
  for (size_t i = 0; i < args.wholes.size(); ++i) {
    const at::Tensor& whole = args.wholes[i];
    const int64_t chunk = args.cuts[i].chunk;
    if (chunk == 0) {
      continue;
    }
    const int64_t length = std::gcd(whole.numel(), chunk), rows = whole.numel() / length;
    if (args.cuts[i].before > 0 || rows == 0 || (rows + size_ - 1) / size_ != chunk / length) {
      return {};
    }
    columns.push_back(view_into(whole, whole.scalar_type(), {rows, length}, {length, 1}, 0));
  }
  if (padding_ > 0) {
    columns.push_back(at::zeros({1, padding_}, columns.front().options()));
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
  size_t i = 0;
  for (const Strip& strip : strips_) {
    for (; i <= strip.last; ++i) {
      const at::Tensor& whole = args.wholes[i];
      const Cut& cut = args.cuts[i];
      int64_t done = 0;
      const auto copy = [&](int64_t ranks, int64_t length) {
        if (ranks * length > 0) {
          const int64_t rank = (cut.before + done) / cut.chunk, column = (cut.before + done) % cut.chunk;
          sources.push_back(view_into(whole, dtype, {ranks, length}, {length, 1}, done));
          targets.push_back(view_into(matrix, dtype, {ranks, length}, {row_, 1}, rank * row_ + strip.column + column));
          done += ranks * length;
        }
      };
      if (cut.numel > 0) {
        const int64_t column = cut.before % cut.chunk;
        copy(1, column == 0 ? 0 : std::min(cut.numel, cut.chunk - column));
        copy((cut.numel - done) / cut.chunk, cut.chunk);
        copy(1, cut.numel - done);
      }
    }
  }
  matrix.zero_();
  copy_each(targets, sources);
}

} // namespace fsdp
