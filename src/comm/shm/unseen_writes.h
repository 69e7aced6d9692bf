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
/// [Note: unseen writes] In such a time ranks are in a write phase of its own kind, beside those that writers announce.
/// All ranks enter one when backward has ended, after which nobody reads in place what is about to be written. A rank
/// is through with it when the time is over (the program says so, or its next backward begins), when it announces a
/// write after all, or when a gather finds its slices changed; a gather after that waits for the others to be through.
/// A rank whose slices are as they were has not begun: it may look at parameters alone. Who has no slices has nothing
/// to write, and goes by the others. An exchange ends the phase, and if the time lasts for all of them, all enter the
/// next. Where a write is not certain, a rank's first gather ends the time for it. Same thread safety as Members.
class UnseenWrites {
 public:
  explicit UnseenWrites(Members& members) : members_(members), phases_(members, &RankSlot::opened, &RankSlot::closed) {}

  /// Memory of this rank's slices, which may be written from now on. Homes go on any thread: these two are thread safe.
  void watch(const char* memory, size_t bytes);
  void forget(const char* memory);

  void begin(bool certain, const Label& label);
  void end();
  /// The phase is over for this rank, which has written or waits for all; the time may go on.
  void leave();
  /// Around a gather: before the first look at others' memory.
  void before_gather();
  void await_others(const Label& label);

  /// As in Phases: around a collective that waits for all ranks, before which they leave.
  bool last() const {
    return last_;
  }
  void resume(bool last_everywhere);

 private:
  struct Slice {
    size_t bytes;
    std::optional<uint64_t> seen; // when the phase began, if it is one of those that are looked at
  };
  void look();
  bool may_have_written() const;

  Members& members_;
  Phases phases_;
  mutable std::mutex mutex_;
  std::map<const char*, Slice> slices_;
  bool last_ = false;
  bool certain_ = false;
  bool has_to_wait_ = false; // for the others, before it gathers
};

} // namespace fsdp::shm
