#pragma once

#include <memory>

#include <fsdp/group.h>

#include "comm/c10d/channel.h"

namespace fsdp::adapter {

/// Starts a reduce-scatter over c10d: copies the wholes together rank by rank, lets the backend sum, copies into the
/// slices.
std::unique_ptr<Work> start_reduce_scatter(std::shared_ptr<Channel> channel, ReduceScatter args, const Label& label);

} // namespace fsdp::adapter
