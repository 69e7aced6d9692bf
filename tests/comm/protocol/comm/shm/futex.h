#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "comm/protocol/watched.h"

/// In place of the library's: ranks sleep when the explorer says so. See [Note: watched code].
namespace fsdp::shm {

inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds) {
  testing::watched::sleep(word, seen);
}

inline void futex_wake_all(std::atomic<uint32_t>&) {} // a sleeper is awake once the word has changed

inline void relax() {
  testing::watched::relax();
}

} // namespace fsdp::shm
