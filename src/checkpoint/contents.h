#pragma once

#include <string>
#include <vector>

#include <fsdp/saved_state.h>

#include "checkpoint/checkpoint_index.h"
#include "checkpoint/piece_writer.h"
#include "checkpoint/replica_turns.h"
#include "checkpoint/seats.h"

namespace fsdp::disk {

/// What one rank gives to a checkpoint.
class Contents {
 public:
  /// `seats`: of all ranks that save.
  Contents(int rank, int64_t step, const StateOfRank& state, const Seats& seats);

  const std::vector<PieceToWrite>& pieces() const {
    return pieces_;
  }
  /// The index without tensors.
  const CheckpointIndex& numbers() const {
    return numbers_;
  }

 private:
  void add(const std::string& name, const HeldTensor& held, bool by_operators);
  void add(const ShardedOptimStateDict& optimizer);
  void add_random_states(const StateOfRank& state);
  void add_extra(const StateOfRank& state);

  int rank_;
  ReplicaTurns turns_;
  std::vector<PieceToWrite> pieces_{};
  CheckpointIndex numbers_{};
};

} // namespace fsdp::disk
