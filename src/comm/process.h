#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp {

/// When a process was started, in ticks since boot; nothing once it has ended (also while nobody has collected it).
std::optional<uint64_t> process_start(int32_t pid);

/// Whether the process of this number and start has ended; no, where that cannot be found out.
bool has_ended(int32_t pid, uint64_t started);

/// Where process numbers mean the same as here: the host and the pid namespace.
std::string process_space();

} // namespace fsdp
