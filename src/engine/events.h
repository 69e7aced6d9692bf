#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace fsdp::engine {

enum class EventKind { kUnshard, kWait, kReshard, kReduce, kReduced, kEndBackward };

/// Something the engine did, in the order in which it did it: for tests and traces.
struct Event {
  EventKind kind;
  const std::string* unit; ///< null for events of the whole model
  int whole_units; ///< units arriving or whole, after the event
  int64_t whole_bytes; ///< memory this rank pays for them
  int reducing; ///< reductions in flight
  int64_t gradient_bytes; ///< whole gradients that have arrived and are not reduced
};

using Observer = std::function<void(const Event&)>;

} // namespace fsdp::engine
