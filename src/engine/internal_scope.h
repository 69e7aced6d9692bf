#pragma once

#include <optional>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "engine/tenant.h"

namespace fsdp::engine {

/// Leaves inference mode, if a thread is in it: asking takes less time than leaving.
class NoInferenceMode {
 public:
  NoInferenceMode() {
    if (c10::InferenceMode::is_enabled()) {
      left_.emplace(false);
    }
  }

 private:
  std::optional<c10::InferenceMode> left_;
};

/// Takes a program's modes of torch_dispatch off a thread, if it has any: they are for the program's operators, and
/// some (selective checkpoints) count these. Those that torch traces with stay.
class NoDispatchModes {
 public:
  NoDispatchModes() {
    take_off();
  }
  ~NoDispatchModes() {
    put_back();
  }
  NoDispatchModes(const NoDispatchModes&) = delete;
  NoDispatchModes& operator=(const NoDispatchModes&) = delete;

  // Those that are there now: the program may have left some, or entered others, since they were put back.
  void take_off() const {
    callers_.reset();
    if (!has_any()) {
      return;
    }
    callers_ = Modes::get_state();
    while (has_any()) {
      Modes::pop_stack();
    }
  }
  // With the keys that go with them. Those of a thread may be of modes that the program has left since.
  void put_back() const {
    if (callers_ || c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Python)) {
      Modes::set_state(callers_ ? *callers_ : Modes::get_state());
    }
  }

 private:
  using Modes = c10::impl::TorchDispatchModeTLS;

  static bool has_any() {
    return Modes::any_modes_set(/*skip_infra_modes=*/true);
  }

  mutable std::optional<Modes> callers_;
};

/// The engine's own operators: not recorded (and no views of anything, to autograd), not cast, no touches, and seen by
/// no mode.
class InternalScope {
 public:
  InternalScope() : no_touch_(keys()) {
    outermost() = outermost() != nullptr ? outermost() : this;
  }
  ~InternalScope() {
    if (outermost() == this) {
      outermost() = nullptr;
    }
  }
  InternalScope(const InternalScope&) = delete;
  InternalScope& operator=(const InternalScope&) = delete;

 private:
  friend class UserScope;

  static c10::DispatchKeySet keys() {
    return kKeys | c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  }
  // Of this thread's calls into the engine, the one that the user's code made.
  static const InternalScope*& outermost() {
    static thread_local const InternalScope* scope = nullptr;
    return scope;
  }

  c10::impl::LocalDispatchKeySet callers_ = c10::impl::tls_local_dispatch_key_set(); // taken before the guards below
  NoDispatchModes modes_;
  NoInferenceMode no_inference_; // what is made here may be trained later
  c10::AutoGradMode grad_mode_{false};
  c10::impl::ExcludeDispatchKeyGuard no_touch_;
};

/// The user's code, called from within the engine: its operators are seen like any others.
class UserScope {
 public:
  UserScope()
      : engine_(std::exchange(InternalScope::outermost(), nullptr)),
        restored_(engine_ != nullptr ? engine_->callers_ : c10::impl::tls_local_dispatch_key_set()) {
    if (engine_ != nullptr) {
      engine_->modes_.put_back();
    }
  }
  ~UserScope() {
    if (engine_ != nullptr) {
      engine_->modes_.take_off();
    }
    InternalScope::outermost() = engine_;
  }
  UserScope(const UserScope&) = delete;
  UserScope& operator=(const UserScope&) = delete;

 private:
  const InternalScope* engine_;
  c10::impl::ForceDispatchKeyGuard restored_;
};

/// The user's code, called in the middle of whatever a thread is doing, as if from the top of a program, but with
/// nothing recorded: its operators are no touches.
class OutermostScope {
 public:
  OutermostScope() = default;
  OutermostScope(const OutermostScope&) = delete;
  OutermostScope& operator=(const OutermostScope&) = delete;

 private:
  NoInferenceMode no_inference_;
  c10::impl::ForceDispatchKeyGuard keys_{c10::default_included_set, c10::default_excluded_set | kKeys};
  c10::AutoGradMode grad_mode_{false};
};

} // namespace fsdp::engine
