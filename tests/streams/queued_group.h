#pragma once

#include <memory>

#include <c10/core/Device.h>

#include <fsdp/group.h>

/// Groups for the queued device.
namespace fsdp::testing {

/// Where the ranks of a group, which are threads, meet.
class MeetingPlace;
std::shared_ptr<MeetingPlace> make_meeting_place(int ranks);

/// As with NCCL: a collective is queued on a stream of the group's own, after what is on the caller's current stream;
/// waiting for it makes the stream wait that is current then. It keeps no tensor alive.
std::shared_ptr<Group> queued_group(
    const std::shared_ptr<MeetingPlace>& place, int rank, int ranks, c10::Device device);

} // namespace fsdp::testing
