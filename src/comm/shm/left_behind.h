#pragma once

#include <cstddef>

namespace fsdp::shm {

/// In a forked child: makes these addresses what no access survives, and says why on stderr before a SIGSEGV that this
/// causes takes its course. Called by one thread.
void leave_behind(char* memory, size_t bytes);

} // namespace fsdp::shm
