#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "comm/shm/phases.h"

namespace fsdp::shm {

/// The times in which ranks write their slices with no word to anybody, as kernels do that another compiler has made.
///
/// [Note: unseen writes] Such a time is a write phase of its own, beside those that writers announce. All ranks enter
/// it when backward has ended, after which nobody reads in place what is about to be written. A rank is through when
/// the program says so, when it announces a write after all, when its next backward begins, or when a gather finds its
/// slices changed; a gather after that waits for the others to be through. A rank whose slices are as they were has not
/// begun: it may look at parameters alone. Who has no slices has nothing to write, and goes by the others. Same thread
/// safety as Members.
class UnseenWrites {
 public:
  explicit UnseenWrites(Members& members) : members_(members), phases_(members, &RankSlot::opened, &RankSlot::closed) {}

  /// Memory of this rank's slices, which may be written. Homes go on any thread: these two are thread safe.
  void watch(const char* memory, size_t bytes);
  void forget(const char* memory);

  void begin(const Label& label);
  void end();
  /// Around a gather: before the first look at others' memory.
  void before_gather();
  void await_others(const Label& label);

  /// As in Phases: around a collective that waits for all ranks.
  bool open() const {
    return phases_.writing();
  }
  void resume(bool all_were_open);

 private:
  std::optional<uint64_t> glance() const; // nothing without slices

  Members& members_;
  Phases phases_;
  mutable std::mutex mutex_;
  std::map<const char*, size_t> slices_;
  std::optional<uint64_t> seen_; // at the beginning
  bool has_to_wait_ = false; // for the others, before it gathers
};

} // namespace fsdp::shm
