#include "base/stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

namespace fsdp {

using c10::impl::VirtualGuardImpl;

bool has_streams(c10::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

Stream current_stream(c10::Device device) {
  return VirtualGuardImpl(device.type()).getStream(device);
}

Stream new_stream(c10::Device device, bool high_priority) {
  if (!has_streams(device)) {
    return current_stream(device);
  }
  return VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, high_priority);
}

void wait_stream(const Stream& stream, const Stream& earlier) {
  if (stream != earlier) {
    Event event;
    event.record(earlier);
    event.block(stream);
  }
}

void synchronize(const Stream& stream) {
  if (has_streams(stream.device())) {
    VirtualGuardImpl(stream.device_type()).synchronizeStream(stream);
  }
}

void Event::record(const Stream& stream) {
  if (!has_streams(stream.device())) {
    event_.reset();
    return;
  }
  // An event belongs to the device it was first recorded on.
  if (!event_ || event_->device() != stream.device()) {
    event_.emplace(stream.device_type());
  }
  event_->record(stream);
}

void Event::block(const Stream& stream) const {
  if (event_ && has_streams(stream.device())) {
    event_->block(stream);
  }
}

bool Event::query() const {
  return !event_ || event_->query();
}

void Event::synchronize() const {
  if (event_) {
    event_->synchronize();
  }
}

} // namespace fsdp
