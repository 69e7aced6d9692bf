#pragma once

#include <chrono>
#include <memory>

#include <fsdp/group.h>
#include "comm/shm/core.h"

namespace fsdp::shm {

struct Joining {
  int rank;
  int size;
  std::chrono::milliseconds timeout;
  std::shared_ptr<Family> family; ///< that fails together
  bool arena = false;
};

/// Meets the other ranks in a control segment that rank 0 makes, and maps their arenas. Calls `exchange` a fixed number
/// of times, also when it fails; then it fails on every rank.
CorePointer join(const Joining& joining, const Exchange& exchange);

/// The group around a core.
std::shared_ptr<Group> make_group(CorePointer core);

} // namespace fsdp::shm
