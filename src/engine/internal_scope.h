#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "engine/tenant.h"

namespace fsdp::engine {

/// The engine's own operators: not recorded (and no views of anything, to autograd), not cast, and no touches.
class InternalScope {
 public:
  InternalScope() : no_touch_(keys()) {}

  static c10::DispatchKeySet keys() {
    return c10::DispatchKeySet({kKey, kInnerKey}) | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
           c10::autocast_dispatch_keyset;
  }

 private:
  c10::AutoGradMode grad_mode_{false};
  c10::impl::ExcludeDispatchKeyGuard no_touch_;
};

/// The user's code, called from within the engine: its operators are seen like any others.
class UserScope {
 public:
  UserScope() : restored_(c10::impl::tls_local_dispatch_key_set().included_, without_internal()) {}

 private:
  static c10::DispatchKeySet without_internal() {
    return c10::impl::tls_local_dispatch_key_set().excluded_ - InternalScope::keys();
  }
  c10::impl::ForceDispatchKeyGuard restored_;
};

} // namespace fsdp::engine
