#pragma once

namespace fsdp {

/// A lock that the program may hold when it calls the library: Python's GIL. Null functions: there is none.
struct CallersLock {
  void* (*let_go)() = nullptr; ///< null if this thread does not hold it
  void (*take_back)(void* token) = nullptr;
};

/// Once, before the library is used.
void set_callers_lock(CallersLock lock);

/// While it lives, this thread does without the caller's lock: around all that may wait for another rank or thread,
/// which may need the lock to get there.
class WithoutCallersLock {
 public:
  WithoutCallersLock();
  ~WithoutCallersLock();
  WithoutCallersLock(const WithoutCallersLock&) = delete;
  WithoutCallersLock& operator=(const WithoutCallersLock&) = delete;

 private:
  void* token_;
};

} // namespace fsdp
