#pragma once

#include <unistd.h>

#include <utility>

#include "base/this_process.h"

namespace fsdp {

/// What is destroyed only in the process that made it: the threads that its destructor waits for do not exist in a
/// process that was forked from that one, and a lock may be held for ever there.
template <typename T>
class OfThisProcess {
 public:
  template <typename... Arguments>
  explicit OfThisProcess(Arguments&&... arguments) : value_(new T(std::forward<Arguments>(arguments)...)) {}
  ~OfThisProcess() {
    if (process_ == getpid()) {
      delete value_;
    }
  }
  OfThisProcess(const OfThisProcess&) = delete;
  OfThisProcess& operator=(const OfThisProcess&) = delete;

  bool is_of_this_process() const {
    return process_ == this_process();
  }
  T& operator*() const {
    return *value_;
  }
  T* operator->() const {
    return value_;
  }

 private:
  T* value_;
  pid_t process_ = this_process();
};

} // namespace fsdp
