#pragma once

#include <algorithm>
#include <chrono>

namespace fsdp {

/// A timeout that can be added to times, and given to systems that count milliseconds in 31 bits: who wants to wait
/// longer than three weeks waits that long.
inline std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(21 * 24));
}

} // namespace fsdp
