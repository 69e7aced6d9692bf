#include "comm/shm/phases.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace fsdp::shm {
namespace {

constexpr size_t kGlances = 64; // slices that are looked at
constexpr size_t kLook = 64; // bytes at either end of one, and at a place that is expected to change
constexpr uint32_t kEnough = UINT32_MAX; // looks of a rank that has nothing to write, or is through

uint64_t digest(const char* memory, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, memory + i, std::min(sizeof(word), bytes - i));
    value = (value ^ word) * 0x9e3779b97f4a7c15;
    value ^= value >> 29;
  }
  return value;
}

} // namespace

void Phases::begin_write(const Label& label) {
  members_.begin(label);
  ++phase_;
  members_.publish(members_.mine().*entered_, phase_);
  members_.await_all(entered_, phase_, label);
  writing_ = true;
}

void Phases::publish_writes() {
  if (writing_) {
    writing_ = false;
    members_.publish(members_.mine().*left_, phase_);
  }
}

void Phases::await_readable(const Label& label) {
  if (readable_ < phase_) {
    members_.await_all(left_, phase_, label);
    readable_ = phase_;
  }
}

void Phases::resume(bool all_were_writing) {
  readable_ = phase_; // whoever was writing has published
  if (all_were_writing) {
    members_.publish(members_.mine().*entered_, ++phase_);
    writing_ = true;
  }
}

UnseenWrites::Glance::Glance(const char* memory_, size_t most_bytes)
    : memory(memory_), bytes(std::min(most_bytes, kLook)), digest(shm::digest(memory, bytes)) {}

bool UnseenWrites::Glance::differs_now() const {
  return digest != shm::digest(memory, bytes);
}

void UnseenWrites::glance_at_ends(const char* memory, size_t bytes) {
  ends_.emplace_back(memory, bytes);
  ends_.emplace_back(memory + bytes - std::min(bytes, kLook), bytes);
}

void UnseenWrites::watch(const char* memory, size_t bytes) {
  if (bytes > 0) {
    const std::scoped_lock lock(mutex_);
    slices_[memory] = bytes;
    glance_at_ends(memory, bytes);
  }
}

void UnseenWrites::forget(const char* memory) {
  const std::scoped_lock lock(mutex_);
  const auto slice = slices_.find(memory);
  if (slice == slices_.end()) {
    return;
  }
  for (auto* glances : {&ends_, &expected_}) {
    std::erase_if(*glances, [&](const Glance& glance) {
      return glance.memory >= memory && glance.memory < memory + slice->second;
    });
  }
  slices_.erase(slice);
}

// Those of an earlier backward stay, of another model, say, until they have changed.
void UnseenWrites::expect(const std::vector<const void*>& changes) {
  const std::scoped_lock lock(mutex_);
  std::erase_if(expected_, [this](const Glance& glance) { return !last_ || glance.differs_now(); });
  for (const void* change : changes) {
    const auto* place = static_cast<const char*>(change);
    const auto after = slices_.upper_bound(place);
    const auto is_it = [place](const Glance& glance) { return glance.memory == place; };
    if (after == slices_.begin() || std::any_of(expected_.begin(), expected_.end(), is_it)) {
      continue;
    }
    const auto& [memory, bytes] = *std::prev(after);
    if (place < memory + bytes) {
      expected_.emplace_back(place, static_cast<size_t>(memory + bytes - place));
    }
  }
}

// An optimizer changes nearly everything: some of it tells.
void UnseenWrites::begin_phase() {
  const std::scoped_lock lock(mutex_);
  ends_.clear();
  const size_t stride = slices_.size() / kGlances + 1;
  size_t index = 0;
  for (const auto& [memory, bytes] : slices_) {
    if (index++ % stride == 0) {
      glance_at_ends(memory, bytes);
    }
  }
  for (Glance& glance : expected_) {
    glance = {glance.memory, glance.bytes};
  }
  looks_ = 0;
  goes_by_others_ = certain_ && expected_.empty();
  if (goes_by_others_) {
    members_.publish(members_.mine().looked, numbered(kEnough));
  }
}

bool UnseenWrites::has_written() const {
  const std::scoped_lock lock(mutex_);
  const auto differs = [](const Glance& glance) { return glance.differs_now(); };
  return std::any_of(expected_.begin(), expected_.end(), differs) || std::any_of(ends_.begin(), ends_.end(), differs);
}

uint64_t UnseenWrites::numbered(uint32_t look) const {
  return phases_.entered() << 32 | look;
}

void UnseenWrites::begin(const ExpectedWrites& expected, const Label& label) {
  if (expected.certain) {
    expect(expected.changes);
  }
  certain_ = expected.certain || (last_ && certain_);
  leave();
  phases_.begin_write(label);
  begin_phase();
  last_ = true;
  has_to_wait_ = false;
}

void UnseenWrites::end() {
  leave();
  last_ = false;
}

void UnseenWrites::leave() {
  if (phases_.writing()) {
    has_to_wait_ = true;
    phases_.publish_writes();
    members_.publish(members_.mine().looked, numbered(kEnough)); // second: who sees it sees the first
  }
}

uint64_t UnseenWrites::before_gather() {
  if (!phases_.writing()) {
    return 0;
  }
  const uint64_t look = numbered(++looks_);
  if (has_written()) {
    leave();
  } else if (!certain_) {
    end();
    has_to_wait_ = false;
  } else if (!goes_by_others_) {
    members_.publish(members_.mine().looked, look);
  }
  return look;
}

// Who cannot go on without this rank does not write either.
void UnseenWrites::await_others(uint64_t look, const Label& label) {
  if (goes_by_others_ && phases_.writing() && look > numbered(0)) { // else all have met since
    follow_others(look, label);
  }
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

void UnseenWrites::follow_others(uint64_t look, const Label& label) {
  members_.await_all(
      label, [&](int r) { return members_.slot(r).looked.load() >= look || members_.waits_for_this_rank(r); });
  for (int r = 0; r < members_.size(); ++r) {
    if (members_.slot(r).closed.load() >= phases_.entered()) {
      leave();
    }
  }
}

void UnseenWrites::resume(bool last_everywhere) {
  phases_.resume(last_everywhere);
  has_to_wait_ = false;
  if (last_everywhere) {
    begin_phase();
  }
}

} // namespace fsdp::shm
