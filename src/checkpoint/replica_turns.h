#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fsdp/held.h>

namespace fsdp::disk {

/// Who writes what several ranks have. Replicas of a shard take turns, so that they write about as much each; what is
/// not sharded comes from the first rank, and what others than libfsdp have cut from the first replica. All of them
/// have to ask for the same tensors in the same order.
class ReplicaTurns {
 public:
  explicit ReplicaTurns(bool is_first_rank) : is_first_rank_(is_first_rank) {}

  /// Whether it is this rank. Of one tensor under several names always the same.
  bool is_mine(const HeldTensor& held);

 private:
  bool take_turn(const HeldTensor& held);

  bool is_first_rank_;
  std::vector<std::pair<Mesh, std::vector<int64_t>>> bytes_{}; // that the replicas on a mesh write
  std::unordered_map<const c10::TensorImpl*, bool> known_{};
};

} // namespace fsdp::disk
