#pragma once

#include <chrono>
#include <string>

#include <fsdp/group.h>

#include "comm/c10d/factory.h"

namespace fsdp {

/// A process group that ranks are about to make.
struct Joining {
  StorePtr store; ///< the new group's alone
  int rank;
  int size;
  std::chrono::milliseconds timeout;
  std::string backend; ///< for errors
  Label label;
};

/// Makes it on all ranks or on none: returns once every rank has it, and if one fails, or the time is over, all get a
/// CommError. Collective.
ProcessGroupPtr join_group(const MakeProcessGroup& make, const Joining& joining);

} // namespace fsdp
