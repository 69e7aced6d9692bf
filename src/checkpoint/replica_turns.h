#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fsdp/held.h>

#include "checkpoint/seats.h"

namespace fsdp::disk {

/// Who writes what several ranks have. Replicas of a shard take turns, so that they write about as much each; what is
/// not sharded comes from the first rank, and what others than libfsdp have cut from the first replica. All of them
/// have to ask for the same tensors in the same order.
class ReplicaTurns {
 public:
  /// `seats`: of all ranks that write.
  ReplicaTurns(bool is_first_rank, Seats seats) : is_first_rank_(is_first_rank), seats_(std::move(seats)) {}

  /// Whether it is this rank. Of one tensor under several names always the same.
  bool is_mine(const HeldTensor& held);

 private:
  /// What the replicas of a mesh write.
  struct Written {
    Mesh mesh;
    std::vector<int64_t> replicas; // that are there
    std::vector<int64_t> bytes; // of each of them
  };

  bool take_turn(const HeldTensor& held);
  Written& written_on(const Mesh& mesh);

  bool is_first_rank_;
  Seats seats_;
  std::vector<Written> written_{};
  std::unordered_map<const c10::TensorImpl*, bool> known_{};
};

} // namespace fsdp::disk
