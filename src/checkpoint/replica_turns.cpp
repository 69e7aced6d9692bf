#include "checkpoint/replica_turns.h"

#include <algorithm>

#include <c10/util/accumulate.h>

namespace fsdp::disk {

namespace {

// Shards are cut along a mesh's last dimension, and alike along all others.
int64_t replicas(const Mesh& mesh) {
  return mesh.numel() / mesh.sizes().back();
}

int64_t replica_of(const Mesh& mesh) {
  int64_t replica = 0;
  for (int dim = 0; dim + 1 < mesh.ndim(); ++dim) {
    replica = replica * mesh.sizes()[dim] + mesh.coordinate(dim);
  }
  return replica;
}

bool is_whole(const HeldTensor& held) {
  return held.extent.numel() == c10::multiply_integers(held.sizes);
}

} // namespace

bool ReplicaTurns::is_mine(const HeldTensor& held) {
  if (!held.mesh) {
    return is_whole(held) ? is_first_rank_ : held.first_replica;
  }
  const auto [place, is_new] = known_.emplace(held.local.unsafeGetTensorImpl(), false);
  if (is_new) {
    place->second = take_turn(held);
  }
  return place->second;
}

bool ReplicaTurns::take_turn(const HeldTensor& held) {
  const Mesh& mesh = *held.mesh;
  auto found = std::find_if(bytes_.begin(), bytes_.end(), [&](const auto& item) { return item.first == mesh; });
  if (found == bytes_.end()) {
    found = bytes_.emplace(bytes_.end(), mesh, std::vector<int64_t>(static_cast<size_t>(replicas(mesh))));
  }
  auto& bytes = found->second;
  const auto least = std::min_element(bytes.begin(), bytes.end());
  *least += held.extent.numel() * static_cast<int64_t>(c10::elementSize(held.dtype()));
  return least - bytes.begin() == replica_of(mesh);
}

} // namespace fsdp::disk
