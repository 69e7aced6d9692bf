#pragma once

#include <optional>
#include <string>
#include <utility>

#include <fsdp/saved_state.h>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/piece_writer.h"
#include "checkpoint/run_folder.h"
#include "checkpoint/seats.h"

namespace fsdp::disk {

/// What one rank does for a checkpoint, in this order. Nothing here talks to other ranks.
class SaveOfRank {
 public:
  SaveOfRank(const std::string& dir, int64_t step, const SaveOptions& options, int rank, int ranks);

  /// The first rank makes the folder into which all write.
  void make_folder();
  /// Of all ranks that save.
  void set_seats(Seats seats) {
    seats_ = std::move(seats);
  }
  /// Once there is the folder.
  void begin(const StateOfRank& state);
  /// What `begin` was given may change from now on.
  void stage();
  /// Returns once all that this rank gives is on the disk, with its part of the index.
  void write(bool with_bar);
  /// The first rank makes a checkpoint of what all have written, and makes room as `keep_last` says. Returns its path.
  std::string finish() const;

  /// Instead of `write`, if that cannot be done. Nothing of the state is held any more.
  void note_failure();
  enum class Part { kUnwritten, kWritten, kFailed };
  Part part_of(int rank) const;
  /// The first rank removes what there is of it, if it has made it. No rank may be writing.
  void give_up() const;

  const std::string& folder() const {
    return folder_;
  }
  /// Whether this is the run's folder.
  bool is_into(const std::string& run) const;

 private:
  template <typename Body>
  void with_writer(const Body& body);
  void write_index() const;

  std::string dir_;
  RunFolder run_;
  int64_t step_;
  std::string folder_; // until it is a checkpoint
  int64_t keep_last_, block_bytes_, max_staged_bytes_;
  bool keep_staging_memory_;
  int rank_, ranks_;
  Seats seats_{};
  CheckpointIndex numbers_{}; // without tensors
  std::optional<PieceWriter> writer_{};
  bool has_made_folder_ = false;
};

} // namespace fsdp::disk
