#pragma once

#include <chrono>

#include "comm/c10d/factory.h"

namespace fsdp {

/// Whether this build can make NCCL groups.
bool nccl_available();

/// Joins `size` ranks, each with a GPU of its own, over NCCL. Collective; the store is this group's alone. Error where
/// NCCL is missing.
std::shared_ptr<Group> nccl_group(
    StorePtr store, int rank, int size, c10::Device device, std::chrono::milliseconds timeout);

} // namespace fsdp
