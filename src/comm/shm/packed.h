#pragma once

#include <cstring>
#include <string>
#include <type_traits>

#include "base/check.h"

namespace fsdp::shm {

/// Plain data as bytes, for the ranks to tell each other.
template <typename T>
std::string packed(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

template <typename T>
T unpacked(const std::string& bytes) {
  static_assert(std::is_trivially_copyable_v<T>);
  FSDP_CHECK(
      bytes.size() == sizeof(T),
      "[shared memory] expected {} bytes from another rank, got {}; all ranks must run the same build",
      sizeof(T),
      bytes.size());
  T value;
  std::memcpy(&value, bytes.data(), sizeof(value));
  return value;
}

} // namespace fsdp::shm
