#pragma once

#include <ATen/autocast_mode.h>

namespace fsdp::engine {

/// Autocast's cache of weights stays as it is for a scope: it would keep a whole low-precision copy of every parameter,
/// and give later code weights that were cast without gradient recording.
class NoAutocastCache {
 public:
  explicit NoAutocastCache(bool wanted = true) : restore_(wanted && at::autocast::is_autocast_cache_enabled()) {
    if (restore_) {
      at::autocast::set_autocast_cache_enabled(false);
    }
  }
  NoAutocastCache(const NoAutocastCache&) = delete;
  NoAutocastCache& operator=(const NoAutocastCache&) = delete;
  ~NoAutocastCache() {
    if (restore_) {
      at::autocast::set_autocast_cache_enabled(true);
    }
  }

 private:
  bool restore_;
};

} // namespace fsdp::engine
