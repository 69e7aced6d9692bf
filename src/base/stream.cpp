#include "base/stream.h"

#include <algorithm>
#include <exception>
#include <string_view>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/log.h"

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

void order_release(const std::function<void()>& body) noexcept {
  try {
    body();
  } catch (const std::exception& error) {
    const std::string_view text = error.what(); // c10's goes on with a stack
    log::error("memory was given back on a device that fails: {}", text.substr(0, text.find('\n')));
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

bool StreamUses::begin(const Stream& stream) {
  if (uses_.empty() || uses_.back().stream != stream) {
    end();
    const auto found = std::find_if(uses_.begin(), uses_.end(), [&](const Use& use) { return use.stream == stream; });
    if (found == uses_.end()) {
      uses_.push_back({stream, {}});
      return present_ = true;
    }
    std::rotate(found, found + 1, uses_.end());
  }
  present_ = true;
  return false;
}

void StreamUses::end() {
  if (std::exchange(present_, false)) {
    uses_.back().last.record(uses_.back().stream);
  }
}

void StreamUses::block(const Stream& stream) const {
  for (const Use& use : uses_) {
    if (use.stream == stream) {
      continue;
    }
    if (present_ && &use == &uses_.back()) {
      wait_stream(stream, use.stream);
    } else {
      use.last.block(stream);
    }
  }
}

std::vector<Stream> StreamUses::streams() const {
  std::vector<Stream> streams;
  for (const Use& use : uses_) {
    streams.push_back(use.stream);
  }
  return streams;
}

void StreamUses::join() const {
  for (size_t i = 0; uses_.size() > 1 && i < uses_.size(); ++i) {
    block(uses_[i].stream);
  }
}

} // namespace fsdp
