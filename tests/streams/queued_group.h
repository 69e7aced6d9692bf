#pragma once

#include <functional>
#include <memory>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

/// Process groups for the queued device.
namespace fsdp::testing {

/// Where the ranks of a group, which are threads, meet.
class MeetingPlace;
std::shared_ptr<MeetingPlace> make_meeting_place(int ranks);

/// As NCCL does: a collective is queued on a stream of the group's own, after what is on the caller's current stream;
/// waiting for it makes the stream wait that is current then. It keeps no tensor alive.
c10::intrusive_ptr<c10d::ProcessGroup> queued_process_group(
    std::shared_ptr<MeetingPlace> place, int rank, int ranks, c10::Device device);

} // namespace fsdp::testing
