#pragma once

#include <sys/types.h>

namespace fsdp {

/// The number of this process, for what asks for it several times in a step: `getpid` is a system call each time.
/// Children of other calls than `fork` (`_Fork`, a bare `clone`) get their parent's: what tells the other ranks
/// something, or ends threads, asks `getpid`.
pid_t this_process();

} // namespace fsdp
