#pragma once

#include <exception>
#include <utility>

#include <fsdp/error.h>

namespace fsdp {

/// What the language of the calling program wants beyond C++. Null functions: nothing.
struct Caller {
  /// Gives up the lock that the program holds in calls (Python's GIL); null if this thread does not hold it.
  void* (*let_go)() = nullptr;
  void (*take_back)(void* token) = nullptr;
  /// Throws an Error in a form that torch hands on to the program as it is.
  void (*raise)(std::exception_ptr error) = nullptr;
  /// With what the program's user has interrupted this thread meanwhile, or null. Asked without the lock.
  std::exception_ptr (*interruption)() = nullptr;
  /// Raises such an interruption as soon as the program goes on; nothing else.
  void (*raise_later)(std::exception_ptr error) = nullptr;
};

/// Once, before the library is used.
void set_caller(Caller caller);

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

/// Null if nobody has interrupted what this thread does, or the caller has no word for it.
std::exception_ptr callers_interruption();

/// In a destructor that has caught `error`, which may be the user's interruption: that is not lost.
void raise_interruption_later(std::exception_ptr error);

/// Rethrows the Error that is being handled, in the caller's form if it has one.
[[noreturn]] void raise_to_caller();

/// Around what torch calls in the middle of an operator or a backward. Of an Error that passes through torch, Python
/// would be told the text only.
template <class Body>
void called_by_torch(Body&& body) {
  try {
    std::forward<Body>(body)();
  } catch (const Error&) {
    raise_to_caller();
  }
}

} // namespace fsdp
