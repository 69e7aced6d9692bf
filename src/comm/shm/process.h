#pragma once

#include <cstdint>
#include <optional>

namespace fsdp::shm {

/// When a process was started, in ticks since boot; nothing once it has ended (also while nobody has collected it).
std::optional<uint64_t> process_start(int32_t pid);

} // namespace fsdp::shm
