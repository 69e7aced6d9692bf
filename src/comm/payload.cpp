#include "comm/payload.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/split_with_sizes_copy.h>
#include <c10/core/ScalarType.h>

#include "base/log.h"
#include "comm/copy_each.h"

namespace fsdp {
namespace {

constexpr int64_t kWholeAlignment = 64; // as torch's own allocations: kernels are chosen by alignment

int64_t item_bytes(c10::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

std::vector<size_t> by_dtype(const std::vector<Piece>& pieces, c10::ScalarType Piece::*which) {
  std::vector<size_t> order(pieces.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::erase_if(order, [&](size_t i) { return pieces[i].chunk == 0; });
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const auto first = pieces[a].*which;
    const auto second = pieces[b].*which;
    return std::pair(-item_bytes(first), first) < std::pair(-item_bytes(second), second);
  });
  return order;
}

at::Tensor pinned_memory(int64_t numel, c10::ScalarType dtype) {
  try {
    return at::empty({numel}, at::TensorOptions().dtype(dtype).pinned_memory(true));
  } catch (const std::exception& error) {
    log::warn_once(
        std::string("no page-locked memory for offloaded shards, copies to the device block: ") + error.what());
    return at::empty({numel}, dtype);
  }
}

} // namespace

at::Tensor slice_memory(int64_t numel, c10::ScalarType dtype, const HomeOptions& options) {
  if (!options.offload || options.device.is_cpu()) {
    return at::empty({numel}, at::TensorOptions().dtype(dtype).device(options.device));
  }
  return options.pin_memory ? pinned_memory(numel, dtype) : at::empty({numel}, dtype);
}

int64_t align_up(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

Payload::Payload(const std::vector<Piece>& pieces, c10::ScalarType Piece::*which)
    : slots(pieces.size()), order(by_dtype(pieces, which)) {
  for (const size_t i : order) {
    const auto dtype = pieces[i].*which;
    if (runs.empty() || runs.back().dtype != dtype) {
      bytes = align_up(bytes, kSendAlignment);
      runs.push_back({dtype, bytes, 0});
    }
    slots[i] = {bytes, pieces[i].chunk * item_bytes(dtype)};
    bytes += slots[i].bytes;
    runs.back().bytes = align_up(bytes, kSendAlignment) - runs.back().offset;
  }
  bytes = align_up(bytes, kSendAlignment);
}

WholePieces::WholePieces(const std::vector<Piece>& pieces, int size) {
  for (const Piece& piece : pieces) {
    offsets.push_back(bytes);
    bytes = align_up(bytes + piece.chunk * size * item_bytes(piece.gathered), kWholeAlignment);
  }
}

GatherPlan::GatherPlan(std::vector<Piece> all_pieces, int ranks, c10::Device where)
    : pieces(std::move(all_pieces)),
      size(ranks),
      device(where),
      stored(pieces, &Piece::stored),
      sent(pieces, &Piece::gathered),
      wholes(pieces, ranks),
      casts(std::any_of(pieces.begin(), pieces.end(), [](const Piece& p) { return p.stored != p.gathered; })) {}

at::Tensor GatherPlan::cast(const at::Tensor& from) const {
  const at::Tensor to = at::empty({sent.bytes}, from.options());
  std::vector<at::Tensor> sources;
  std::vector<at::Tensor> targets;
  for (const size_t i : sent.order) {
    sources.push_back(from.narrow(0, stored.slots[i].offset, stored.slots[i].bytes).view(pieces[i].stored));
    targets.push_back(to.narrow(0, sent.slots[i].offset, sent.slots[i].bytes).view(pieces[i].gathered));
  }
  copy_each(targets, sources);
  return to;
}

void GatherPlan::copy_out(const at::Tensor& rows, const at::Tensor& memory) const {
  device.is_cpu() ? copy_out_on_host(rows, memory) : copy_out_on_device(rows, memory);
}

void GatherPlan::copy_out_on_host(const at::Tensor& rows, const at::Tensor& memory) const {
  for (const size_t i : sent.order) {
    const int64_t bytes = sent.slots[i].bytes;
    const char* from = static_cast<const char*>(rows.const_data_ptr()) + sent.slots[i].offset;
    char* to = static_cast<char*>(memory.mutable_data_ptr()) + wholes.offsets[i];
    for (int left = pieces[i].holders(); left > 0; --left, from += sent.bytes, to += bytes) {
      std::memcpy(to, from, bytes);
    }
  }
}

// One kernel for all pieces; the gaps between dtypes go to memory that nobody reads.
void GatherPlan::copy_out_on_device(const at::Tensor& rows, const at::Tensor& memory) const {
  std::vector<at::Tensor> outputs;
  std::vector<int64_t> sizes;
  int64_t end = 0;
  const auto skip_to = [&](int64_t begin) {
    if (begin > end) {
      outputs.push_back(at::empty({size, begin - end}, rows.options()));
      sizes.push_back(begin - end);
    }
  };
  for (const size_t i : sent.order) {
    const int64_t bytes = sent.slots[i].bytes;
    skip_to(sent.slots[i].offset);
    outputs.push_back(memory.narrow(0, wholes.offsets[i], bytes * size).view({size, bytes}));
    sizes.push_back(bytes);
    end = sent.slots[i].offset + bytes;
  }
  skip_to(sent.bytes);
  at::split_with_sizes_copy_out(outputs, rows.view({size, sent.bytes}), sizes, /*dim=*/1);
}

} // namespace fsdp
