#pragma once

#include <functional>
#include <memory>

#include <fsdp/group.h>

namespace fsdp::disk {

/// The group that was given, or all ranks of the job; without a job, this rank alone.
std::shared_ptr<Group> group_or_world(const std::shared_ptr<Group>& given);

/// Does something on all ranks. If it is an error on any, it is an Error on all, which says what the first of these
/// ranks said; the first rank then cleans up, unless others may still be at it. Collective.
void all_agree(
    Group& group,
    const Label& label,
    const std::function<void()>& body,
    const std::function<void()>& clean_up = nullptr);

} // namespace fsdp::disk
