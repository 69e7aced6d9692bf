#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <fsdp/group.h>
#include <fsdp/held.h>
#include <fsdp/mesh.h>
#include <fsdp/saved_state.h>
#include <fsdp/state_dict.h>

namespace fsdp::disk {

/// Where ranks sit on the meshes of what they have: of those that write, which need not be all ranks of a mesh.
class Seats {
 public:
  /// Those of this rank.
  void add(const ShardedStateDict& state);
  void add(const StateOfRank& state);
  /// Those of all ranks. Collective.
  void exchange(Group& group, const Label& label);

  /// Which ones there are of the shard that this rank has, in their order.
  std::vector<int64_t> replicas(const Mesh& mesh) const;

 private:
  void add(const HeldTensor& held);

  std::set<std::string> seats_{};
};

/// Which one this rank has.
int64_t replica_of(const Mesh& mesh);

} // namespace fsdp::disk
