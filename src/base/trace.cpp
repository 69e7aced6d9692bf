#include <fsdp/trace.h>

#include <utility>

#include "base/tracing.h"

namespace fsdp {

Trace::Trace(const std::string& file) {
  tracing::start(file);
}

Trace::Trace(Trace&& other) noexcept : recording_(std::exchange(other.recording_, false)) {}

Trace::~Trace() {
  if (recording_) {
    tracing::stop();
  }
}

Trace trace(const std::string& file) {
  return Trace(file);
}

} // namespace fsdp
