#include "engine/running_calls.h"

namespace fsdp::engine::running_calls {

static thread_local int count = 0;

void begin() {
  ++count;
}

void end() {
  --count;
}

bool any() {
  return count > 0;
}

} // namespace fsdp::engine::running_calls
