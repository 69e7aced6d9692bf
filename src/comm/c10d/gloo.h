#pragma once

#include <chrono>

#include "comm/c10d/factory.h"

namespace fsdp {

/// Whether this build can make Gloo groups.
bool gloo_available();

/// Makes Gloo process groups for the CPU; null where Gloo is missing.
MakeProcessGroup gloo_process_groups(std::chrono::milliseconds timeout);

/// Joins `size` ranks over TCP. Collective; the store is this group's alone. Error where Gloo is missing.
std::shared_ptr<Group> gloo_group(StorePtr store, int rank, int size, std::chrono::milliseconds timeout);

} // namespace fsdp
