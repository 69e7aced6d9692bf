#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include <fsdp/group.h>

/// What lies in a group's control segment. It starts as zeros, which is the initial value of every field.
namespace fsdp::shm {

using Counter = std::atomic<uint64_t>;

/// A short text in shared memory that others may read at any moment: they may see a mix of two texts, never anything
/// worse. Too long texts lose their beginning, since the end of a unit's name tells more.
template <size_t kBytes>
class Text {
 public:
  void store(std::string_view text) {
    text.remove_prefix(text.size() - std::min(text.size(), kBytes - 1));
    const size_t words = text.size() / 8 + 1; // with the closing zero
    for (size_t i = 0; i < words; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + 8 * i, std::min<size_t>(8, text.size() - 8 * i));
      words_[i].store(word, std::memory_order_relaxed);
    }
  }

  std::string load() const {
    std::array<char, kBytes> bytes;
    for (size_t i = 0; i < words_.size(); ++i) {
      const uint64_t word = words_[i].load(std::memory_order_relaxed);
      std::memcpy(bytes.data() + 8 * i, &word, 8);
    }
    return {bytes.data(), strnlen(bytes.data(), kBytes)};
  }

 private:
  static_assert(kBytes % 8 == 0);
  std::array<std::atomic<uint64_t>, kBytes / 8> words_;
};

/// A rank's label as the others see it.
struct SharedLabel {
  Text<40> operation;
  Text<96> unit;

  void store(const Label& label) {
    operation.store(label.operation);
    unit.store(label.unit);
  }
};

/// What one rank says about one collective. Written before the rank's `posted` reaches the collective's number; it
/// stays until every rank has finished that collective.
struct alignas(64) Post {
  static constexpr size_t kWords = 40;
  static constexpr size_t kBytes = kWords * sizeof(uint64_t);

  uint64_t fingerprint; // of operation, unit and sizes: equal on all ranks
  uint64_t history; // of those before it: not every rank looks at each one of every other
  SharedLabel label;
  uint64_t words[kWords]; // addresses, or the bytes themselves when they are few
};

/// What one rank tells the others. Every cache line has one writer, but for the bell.
struct alignas(64) RankSlot {
  static constexpr uint64_t kPosts = 32; // collectives that may be unfinished somewhere
  static constexpr int32_t kNobody = 0; // in the two fields below, where rank r is r + 1
  static constexpr int32_t kAnybody = -1;

  // Sleep: whoever changes something that this rank waits for rings the bell.
  std::atomic<uint32_t> bell;
  std::atomic<int32_t> wakes_for; // whose changes have to ring
  std::atomic<int32_t> waits_for; // the rank that it cannot go on without
  std::atomic<uint32_t> heard; // one more than the last ring after which it still had to wait; 0 before that
  std::atomic<uint32_t> left; // the group
  int32_t pid;
  uint64_t started; // tells the process from a later one of the same pid

  alignas(64) Counter posted; // collectives begun
  Counter finished; // collectives for which this rank has read all that it needs from others
  Counter writing; // write phases entered
  Counter published; // write phases left
  Counter opened; // times for unseen writes that it has entered,
  Counter closed; // and is through with
  Counter looked; // high half: such a time; low half: gathers in it before a write, see UnseenWrites
  std::atomic<uint32_t> reading; // it is reading other ranks' tensors just now

  alignas(64) SharedLabel doing; // the operation called last
  Post posts[kPosts];
};

struct Control {
  enum Failure : uint32_t { kNone, kBeingWritten, kWritten };

  std::atomic<uint32_t> failure;
  std::atomic<int32_t> failed_rank;
  Text<1024> reason;
  RankSlot ranks[]; // one per rank

  static size_t bytes(int size) {
    return sizeof(Control) + sizeof(RankSlot) * static_cast<size_t>(size);
  }
};

} // namespace fsdp::shm
