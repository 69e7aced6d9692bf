#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp {

/// When a process was started, in ticks since boot; nothing once it has ended (also while nobody has collected it).
std::optional<uint64_t> process_start(int32_t pid);

/// Where process numbers mean the same as here: the host and the pid namespace.
std::string process_space();

} // namespace fsdp
