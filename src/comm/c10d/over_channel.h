#pragma once

#include <memory>
#include <vector>

#include <fsdp/group.h>

#include "comm/c10d/channel.h"

/// What a group does over its channel, one file each.
namespace fsdp::adapter {

/// Slices in memory that only this rank sees, gathered by copying them to every rank. Not thread safe.
std::shared_ptr<Home> make_private_home(
    std::shared_ptr<Channel> channel, std::vector<Piece> pieces, const HomeOptions& options);

/// Starts an all-reduce in place.
std::unique_ptr<Work> start_all_reduce(
    std::shared_ptr<Channel> channel, at::Tensor tensor, ReduceOp op, double divide_by, const Label& label);

/// Starts a reduce-scatter over c10d: copies the wholes together rank by rank, lets the backend sum, copies into the
/// slices.
std::unique_ptr<Work> start_reduce_scatter(std::shared_ptr<Channel> channel, ReduceScatter args, const Label& label);

} // namespace fsdp::adapter
