#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include <fsdp/fsdp.h>

#include "nn/parity.h"
#include "streams/queued_device.h"
#include "streams/queued_group.h"
#include "support/scoped_environment.h"

namespace fsdp::testing {

/// Ranks as threads, each with a device of its own.
struct Devices {
  explicit Devices(const Arrangement& arrangement) : arrangement(arrangement) {
    for (int i = 0; i < arrangement.replicas; ++i) {
      shards.push_back(make_meeting_place(arrangement.shards));
    }
    for (int i = 0; i < arrangement.shards; ++i) {
      replicas.push_back(make_meeting_place(arrangement.replicas));
    }
  }

  /// On the calling rank.
  Mesh mesh() const {
    const c10::Device device = queued_device::device(rank());
    c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
    const int shard = rank() % arrangement.shards, replica = rank() / arrangement.shards;
    if (arrangement.ranks() == 1) {
      const auto group = queued_group(shards[0], 0, 1, device);
      return Mesh::from_groups({group->split(0, {"split", ""})}, {"shard"}, device);
    }
    auto inner =
        arrangement.shards == 1 ? group_of_one() : queued_group(shards[replica], shard, arrangement.shards, device);
    if (arrangement.replicas == 1) {
      return Mesh::from_group(inner, "shard");
    }
    auto outer = queued_group(replicas[shard], replica, arrangement.replicas, device);
    return Mesh::from_groups({outer, inner}, {"replicate", "shard"});
  }

  Arrangement arrangement;
  std::vector<std::shared_ptr<MeetingPlace>> shards;
  std::vector<std::shared_ptr<MeetingPlace>> replicas;
};

/// The order check, a collective before each, would hide what nothing else puts in order.
inline void on_devices(
    const Arrangement& arrangement, const std::function<void(const Mesh&)>& body, bool check_order = false) {
  const ScopedEnvironment environment(
      std::map<std::string, std::string>{{"FSDP_CHECK_ORDER", check_order ? "1" : "0"}});
  const Devices devices(arrangement);
  on_threads(arrangement.ranks(), [&] {
    const Mesh mesh = devices.mesh();
    device_of_inputs = mesh.device();
    body(mesh);
    barrier();
  });
}

} // namespace fsdp::testing
