#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <fsdp/group.h>

namespace fsdp {

/// Where each slice lies in the bytes that one rank contributes to an all-gather. Every slice takes its full chunk, so
/// that all ranks send equally much; pieces of one dtype lie together; the total is a multiple of 16, below which
/// NCCL's speed collapses.
struct Payload {
  /// `dtype`: the one that is sent.
  Payload(const std::vector<Piece>& pieces, c10::ScalarType Piece::*dtype);

  struct Slot {
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  /// The pieces of one dtype.
  struct Run {
    c10::ScalarType dtype;
    int64_t offset;
    int64_t bytes;
  };

  std::vector<Slot> slots; ///< one for each piece
  std::vector<size_t> order; ///< the pieces by their offsets, without those that hold nothing
  std::vector<Run> runs;
  int64_t bytes = 0;
};

/// Where each whole piece lies in the memory of a `Gathered`. A piece takes size * chunk elements: trailing ranks'
/// padding comes last, so the first `numel` are the piece.
struct WholePieces {
  WholePieces(const std::vector<Piece>& pieces, int size);

  std::vector<int64_t> offsets;
  int64_t bytes = 0;
};

/// What does not change from one all-gather of the same pieces to the next.
struct GatherPlan {
  GatherPlan(std::vector<Piece> all_pieces, int ranks, c10::Device where);

  std::vector<Piece> pieces;
  int size;
  c10::Device device; ///< where gathered pieces are read
  Payload stored;
  Payload sent;
  WholePieces wholes;
  bool casts;

  /// Bytes of `stored` as those of `sent`.
  at::Tensor cast(const at::Tensor& from) const;
  /// From every rank's bytes of `sent`, one after another, to the whole pieces.
  void copy_out(const at::Tensor& rows, const at::Tensor& memory) const;

 private:
  void copy_out_on_host(const at::Tensor& rows, const at::Tensor& memory) const;
  void copy_out_on_device(const at::Tensor& rows, const at::Tensor& memory) const;
};

/// Memory for a home's slices, with nothing in it yet. Where there is no page-locked memory, ordinary memory and a
/// warning.
at::Tensor slice_memory(int64_t numel, c10::ScalarType dtype, const HomeOptions& options);

/// Bytes: what the copies around a collective are fast with.
constexpr int64_t kSendAlignment = 16;

int64_t align_up(int64_t value, int64_t alignment);

} // namespace fsdp
