#pragma once

#include <c10/util/StringUtil.h>

#include <fsdp/error.h>

namespace fsdp {

/// Throws an Error whose message is the arguments printed one after another.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(c10::str(parts...));
}

} // namespace fsdp

/// For mistakes of the caller or the environment: throws fsdp::Error with the message unless `condition` holds. The
/// message is only put together when it is needed. A broken invariant of our own is a TORCH_INTERNAL_ASSERT instead.
#define FSDP_CHECK(condition, ...)   \
  do {                               \
    if (!(condition)) [[unlikely]] { \
      ::fsdp::fail(__VA_ARGS__);     \
    }                                \
  } while (false)
