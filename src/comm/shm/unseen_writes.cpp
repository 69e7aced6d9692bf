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

} // namespace

void UnseenWrites::watch(const char* memory, size_t bytes) {
  if (bytes > 0) {
    const std::scoped_lock lock(mutex_);
    slices_[memory] = bytes;
  }
}

void UnseenWrites::forget(const char* memory) {
  const std::scoped_lock lock(mutex_);
  slices_.erase(memory);
}

// An optimizer changes nearly everything: some of it tells.
std::optional<uint64_t> UnseenWrites::glance() const {
  const std::scoped_lock lock(mutex_);
  if (slices_.empty()) {
    return std::nullopt;
  }
  const size_t stride = slices_.size() / kGlances + 1;
  uint64_t value = 0;
  size_t index = 0;
  for (const auto& [memory, bytes] : slices_) {
    if (index++ % stride == 0) {
      value = digest(value, memory, std::min(bytes, kLook));
      const size_t rest = bytes - std::min(bytes, kLook);
      value = digest(value, memory + bytes - std::min(rest, kLook), std::min(rest, kLook));
    }
  }
  return value;
}

void UnseenWrites::begin(const Label& label) {
  end();
  phases_.begin_write(label);
  seen_ = glance();
  has_to_wait_ = false;
}

void UnseenWrites::end() {
  has_to_wait_ = has_to_wait_ || open();
  phases_.publish_writes();
}

void UnseenWrites::before_gather() {
  if (!open()) {
    return;
  }
  if (const auto now = glance(); !now || now != seen_) {
    end();
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

void UnseenWrites::resume(bool all_were_open) {
  phases_.resume(all_were_open);
  has_to_wait_ = false;
  if (open()) {
    seen_ = glance();
  }
}

} // namespace fsdp::shm
