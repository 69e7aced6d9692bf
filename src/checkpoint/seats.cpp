#include "checkpoint/seats.h"

#include <sstream>
#include <utility>

#include "base/format.h"
#include "base/phrase.h"

namespace fsdp::disk {

namespace {

// Shards are cut along a mesh's last dimension, and alike along all others. Groups have no names that all ranks know:
// two meshes of the same sizes are one here.
std::string seat(const Mesh& mesh, int64_t replica) {
  return phrase("{}: shard {}, replica {}", join(mesh.sizes(), "x"), mesh.coordinate(mesh.ndim() - 1), replica);
}

} // namespace

int64_t replica_of(const Mesh& mesh) {
  int64_t replica = 0;
  for (int dim = 0; dim + 1 < mesh.ndim(); ++dim) {
    replica = replica * mesh.sizes()[dim] + mesh.coordinate(dim);
  }
  return replica;
}

void Seats::add(const HeldTensor& held) {
  if (held.mesh) {
    seats_.insert(seat(*held.mesh, replica_of(*held.mesh)));
  }
}

void Seats::add(const ShardedStateDict& state) {
  for (const auto& item : state) {
    add(item.value());
  }
}

void Seats::add(const StateOfRank& state) {
  add(state.model);
  if (!state.optimizer) {
    return;
  }
  for (const auto& item : state.optimizer->state) {
    for (const auto& [key, tensor] : item.value().tensors) {
      add(tensor);
    }
  }
}

void Seats::exchange(Group& group, const Label& label) {
  std::set<std::string> all;
  for (const auto& seats : group.exchange(join(seats_, "\n"), label)) {
    std::istringstream lines(seats);
    for (std::string line; std::getline(lines, line);) {
      all.insert(line);
    }
  }
  seats_ = std::move(all);
}

std::vector<int64_t> Seats::replicas(const Mesh& mesh) const {
  const int64_t count = mesh.numel() / mesh.sizes().back();
  std::vector<int64_t> replicas;
  for (int64_t replica = 0; replica < count; ++replica) {
    if (seats_.contains(seat(mesh, replica))) {
      replicas.push_back(replica);
    }
  }
  return replicas;
}

} // namespace fsdp::disk
