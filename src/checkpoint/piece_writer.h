#pragma once

#include <map>
#include <string>
#include <vector>

#include <fsdp/held.h>

#include "checkpoint/checkpoint_index.h"

namespace fsdp::disk {

/// What a rank has of a tensor, and whether it writes that.
struct PieceToWrite {
  std::string name{}; ///< in the index
  HeldTensor held{};
  bool written_here = false;
};

struct PieceFile {
  std::string folder{};
  std::string name{};
  int64_t block_bytes = 1; ///< that have one checksum
};

/// Writes a rank's pieces into its file; returns once they are on the disk. One tensor under several names is written
/// once.
std::map<std::string, IndexedTensor> write_pieces(const std::vector<PieceToWrite>& pieces, const PieceFile& file);

} // namespace fsdp::disk
