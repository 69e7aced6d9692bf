#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "nn/parity.h"
#include "nn/subjects.h"
#include "streams/devices.h"
#include "streams/queued_device.h"

/// Training on a device whose memory and streams are watched: every use of memory is ordered after the uses before it,
/// and the numbers are those of unsharded training on the same device.
namespace fsdp::testing {

using Races = std::vector<std::string>;

inline void expect_parity_without_races(const Trial& trial, const Arrangement& arrangement = {2}) {
  device_of_inputs = queued_device::device(0);
  const auto reference = train_unsharded(trial, arrangement);
  queued_device::detector().begin_test();
  on_devices(arrangement, [&](const Mesh& mesh) {
    Trial mine = trial;
    mine.options.mesh = mesh;
    train_sharded(mine, reference);
  });
  EXPECT_EQ(queued_device::detector().take_races(), Races());
}

inline Trial tied() {
  return {.make = [] { return subjects::tied(); }};
}

} // namespace fsdp::testing
