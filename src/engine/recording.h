#pragma once

#include <optional>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "engine/tenant.h"

namespace fsdp::engine {

/// While one lives, this thread's operators come to the interposer, whatever tensors they are given, and are recorded.
/// What they return are tensors of the right device, sizes and dtype without memory, which know how they are made:
/// hollow, like handles. Views of these are made as ever; writes to them are recorded too. Random numbers are drawn
/// once and thrown away, so that the generator is where it would be.
class Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  static bool is_active() {
    return depth != 0;
  }

  /// Our own code, called while a recording is active: its operators run.
  class Pause {
   public:
    Pause();
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    int depth_;
    std::optional<c10::impl::ForceDispatchKeyGuard> keys_;
  };

 private:
  static inline thread_local int depth = 0;
  c10::impl::IncludeDispatchKeyGuard keys_;
};

/// An operator is called during a recording: it is recorded, or it runs, if there is nothing to record. False if
/// something of it is sharded: then it is not the recording's.
bool record(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// An operator outside of a recording reads or writes what was recorded. What is no parameter gets its values; a
/// parameter is an Error.
void use_recorded(const at::Tensor& recorded, const std::string& operation);

} // namespace fsdp::engine
