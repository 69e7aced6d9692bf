#pragma once

#include <utility>

namespace fsdp {

/// While one lives, no other rank will read the big CPU tensors that its thread makes: they do not take up shared
/// memory.
class PrivateMemory {
 public:
  PrivateMemory() : before_(std::exchange(wanted_, true)) {}
  ~PrivateMemory() {
    wanted_ = before_;
  }
  PrivateMemory(const PrivateMemory&) = delete;
  PrivateMemory& operator=(const PrivateMemory&) = delete;

  static bool wanted() {
    return wanted_;
  }

 private:
  inline static thread_local bool wanted_ = false;
  bool before_;
};

} // namespace fsdp
