#pragma once

#include <chrono>

#include "comm/c10d/factory.h"

namespace fsdp {

/// Whether this build can make Gloo groups.
bool gloo_available();

/// Joins `size` ranks over TCP. Collective; the store is this group's alone. Error where Gloo is missing.
std::shared_ptr<Group> gloo_group(StorePtr store, int rank, int size, std::chrono::milliseconds timeout);

} // namespace fsdp
