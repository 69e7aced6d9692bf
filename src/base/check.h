#pragma once

#include <fsdp/error.h>

#include "base/phrase.h"

namespace fsdp {

/// Throws an Error whose message is the text with the arguments in it.
template <typename... Args>
[[noreturn]] void fail(TextWith<std::type_identity_t<Args>...> text, const Args&... args) {
  throw Error(phrase<Args...>(text, args...));
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
