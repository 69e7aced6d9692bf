#pragma once

#include <mutex>

#include "base/caller.h"
#include "engine/internal_scope.h"
#include "engine/runtime.h"

namespace fsdp::engine {

/// While it lives, this thread is at work on the units of a runtime, and no other is. It may wait for other ranks or
/// threads meanwhile, so it does without the caller's lock.
class AtWork {
 public:
  explicit AtWork(Runtime& runtime) : lock_(runtime.lock()) {}

 private:
  WithoutCallersLock no_callers_lock_; // taken back last: whoever has it may want the runtime's
  std::unique_lock<std::recursive_mutex> lock_;
  InternalScope scope_;
};

} // namespace fsdp::engine
