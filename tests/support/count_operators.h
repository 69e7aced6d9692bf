#pragma once

#include <memory>

#include <ATen/record_function.h>

namespace fsdp::testing {

/// How many operators `body` calls on this thread, without those that operators call.
template <typename Body>
int count_operators(const Body& body) {
  thread_local int count, depth;
  count = depth = 0;
  const auto enter = [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
    count += depth++ == 0 ? 1 : 0;
    return nullptr;
  };
  const auto leave = [](const at::RecordFunction&, at::ObserverContext*) { --depth; };
  const auto callback =
      at::addThreadLocalCallback(at::RecordFunctionCallback(enter, leave).scopes({at::RecordScope::FUNCTION}));
  body();
  at::removeCallback(callback);
  return count;
}

} // namespace fsdp::testing
