#pragma once

#include <sys/types.h>

namespace fsdp {

/// The number of this process, for what asks for it several times in a step: `getpid` is a system call each time. Those
/// forked by `fork` know their own.
pid_t this_process();

} // namespace fsdp
