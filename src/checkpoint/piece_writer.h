#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fsdp/held.h>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/late_copy.h"
#include "checkpoint/progress.h"
#include "checkpoint/safetensors_file.h"
#include "checkpoint/staging_memory.h"

namespace fsdp::disk {

/// What a rank has of a tensor, and whether it writes that.
struct PieceToWrite {
  std::string name{}; ///< in the index
  HeldTensor held{};
  bool written_here = false;
  bool by_operators = false; ///< is changed by them alone: nothing else keeps its address
};

struct PieceFile {
  std::string folder{};
  std::string name{};
  int64_t block_bytes = 1; ///< that have one checksum
};

/// Writes a rank's pieces into its file. One tensor under several names is written once. For one thread at a time.
class PieceWriter {
 public:
  /// Makes the file.
  PieceWriter(const std::vector<PieceToWrite>& pieces, const PieceFile& file);

  int64_t bytes() const;
  /// Copies as many tensors as `most` bytes hold, the last ones, and writes the others; those that only operators
  /// change are copied before they do, or by `finish`. The tensors themselves are not needed any more.
  void stage(int64_t most, bool keep_memory);
  /// Writes what is left; returns once all of it is on the disk.
  std::map<std::string, IndexedTensor> finish(Progress& progress);

 private:
  /// What comes into the file.
  struct Stored {
    std::string name{};
    HeldTensor held{}; // until it is staged
    bool by_operators = false;
    at::Tensor staged{};
    std::unique_ptr<LateCopy> late{}; // which fills it
    StoredPiece piece{};
  };

  using Contents = std::map<std::string, const PieceToWrite*>;
  void add(const PieceToWrite& piece, Contents& contents);
  /// The first of the last ones whose copies fit, and the bytes of these.
  std::pair<size_t, int64_t> what_fits(int64_t most) const;
  void stage(Stored& stored);
  void finish_copies();
  void write_until(size_t end, Progress& progress);

  int64_t block_bytes_;
  std::map<std::string, IndexedTensor> index_{}; // without pieces
  std::map<std::string, std::string> name_in_file_{}; // of those of the index that have something in it
  std::map<const c10::TensorImpl*, std::string> first_names_{};
  std::optional<SafetensorsWriter> writer_{};
  std::optional<StagingMemory> memory_{}; // outlives copies into it
  std::vector<Stored> stored_{}; // in the order of the file
  size_t written_ = 0; // of these
};

} // namespace fsdp::disk
