#include "checkpoint/replica_turns.h"

#include <algorithm>

#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

namespace fsdp::disk {

namespace {

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
  Written& written = written_on(*held.mesh);
  const auto least = std::min_element(written.bytes.begin(), written.bytes.end());
  *least += held.extent.numel() * static_cast<int64_t>(c10::elementSize(held.dtype()));
  return written.replicas[static_cast<size_t>(least - written.bytes.begin())] == replica_of(*held.mesh);
}

ReplicaTurns::Written& ReplicaTurns::written_on(const Mesh& mesh) {
  const auto found =
      std::find_if(written_.begin(), written_.end(), [&](const auto& each) { return each.mesh == mesh; });
  if (found != written_.end()) {
    return *found;
  }
  auto replicas = seats_.replicas(mesh);
  TORCH_INTERNAL_ASSERT(!replicas.empty()); // this rank's at least
  std::vector<int64_t> bytes(replicas.size());
  written_.push_back({mesh, std::move(replicas), std::move(bytes)});
  return written_.back();
}

} // namespace fsdp::disk
