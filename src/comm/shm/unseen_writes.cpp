#include "comm/shm/unseen_writes.h"

#include <algorithm>
#include <cstring>

namespace fsdp::shm {
namespace {

constexpr size_t kGlances = 64; // slices that are looked at
constexpr size_t kLook = 64; // bytes at either end of one

uint64_t digest(uint64_t value, const char* memory, size_t bytes) {
  for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, memory + i, std::min(sizeof(word), bytes - i));
    value = (value ^ word) * 0x9e3779b97f4a7c15;
    value ^= value >> 29;
  }
  return value;
}

// Of both ends.
uint64_t glance(const char* memory, size_t bytes) {
  const size_t first = std::min(bytes, kLook), last = std::min(bytes - first, kLook);
  return digest(digest(0, memory, first), memory + bytes - last, last);
}

} // namespace

void UnseenWrites::watch(const char* memory, size_t bytes) {
  if (bytes > 0) {
    const std::scoped_lock lock(mutex_);
    slices_[memory] = {bytes, glance(memory, bytes)};
  }
}

void UnseenWrites::forget(const char* memory) {
  const std::scoped_lock lock(mutex_);
  slices_.erase(memory);
}

// An optimizer changes nearly everything: some of it tells.
void UnseenWrites::look() {
  const std::scoped_lock lock(mutex_);
  const size_t stride = slices_.size() / kGlances + 1;
  size_t index = 0;
  for (auto& [memory, slice] : slices_) {
    slice.seen = index++ % stride == 0 ? std::optional(glance(memory, slice.bytes)) : std::nullopt;
  }
}

bool UnseenWrites::may_have_written() const {
  const std::scoped_lock lock(mutex_);
  return (slices_.empty() && certain_) || std::any_of(slices_.begin(), slices_.end(), [](const auto& item) {
           const auto& [memory, slice] = item;
           return slice.seen && *slice.seen != glance(memory, slice.bytes);
         });
}

void UnseenWrites::begin(bool certain, const Label& label) {
  certain_ = certain || (last_ && certain_);
  leave();
  phases_.begin_write(label);
  look();
  last_ = true;
  has_to_wait_ = false;
}

void UnseenWrites::end() {
  leave();
  last_ = false;
}

void UnseenWrites::leave() {
  has_to_wait_ = has_to_wait_ || phases_.writing();
  phases_.publish_writes();
}

void UnseenWrites::before_gather() {
  if (!phases_.writing()) {
    return;
  }
  if (may_have_written()) {
    leave();
  } else if (!certain_) {
    phases_.publish_writes();
    last_ = false;
  }
}

// Who cannot go on without this rank does not write either.
void UnseenWrites::await_others(const Label& label) {
  if (!has_to_wait_) {
    return;
  }
  bool all_are_through = true;
  const uint64_t phase = phases_.entered();
  const uint64_t writing = members_.mine().writing.load(std::memory_order_relaxed);
  members_.await_all(label, [&](int r) {
    const RankSlot& other = members_.slot(r);
    const bool through = other.closed.load() >= phase;
    const bool stands_still = through || other.writing.load() > writing || members_.waits_for_this_rank(r);
    all_are_through = all_are_through && (through || !stands_still);
    return stands_still;
  });
  has_to_wait_ = !all_are_through;
}

void UnseenWrites::resume(bool last_everywhere) {
  phases_.resume(last_everywhere);
  has_to_wait_ = false;
  if (last_everywhere) {
    look();
  }
}

} // namespace fsdp::shm
