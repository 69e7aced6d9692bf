#pragma once

#include <memory>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <fsdp/group.h>

#include "streams/race_detector.h"

/// Groups for the queued device.
namespace fsdp::testing {

/// Where the ranks of a group, which are threads, meet.
class MeetingPlace;
std::shared_ptr<MeetingPlace> make_meeting_place(int ranks);

/// As with NCCL: a collective is queued on a stream of the group's own, after what is on the caller's current stream;
/// waiting for it makes the stream wait that is current then. It keeps no tensor alive.
std::shared_ptr<Group> queued_group(
    const std::shared_ptr<MeetingPlace>& place, int rank, int ranks, c10::Device device);

/// A collective on its stream: what it came after, and its end.
struct QueuedCollective {
  std::string name;
  Clock begin;
  Clock end;
};
/// Those of the device since the last call, in the order in which they were queued.
std::vector<QueuedCollective> take_collectives(c10::Device device);

} // namespace fsdp::testing
