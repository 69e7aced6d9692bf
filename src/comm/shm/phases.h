#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include <fsdp/group.h>

#include "comm/shm/members.h"

namespace fsdp::shm {

/// The order between one rank's writes to its slices and the others' reads.
///
/// [Note: write phases] All homes of a group are written in turns with being read. A rank enters write phase e with its
/// first write after a gather, and leaves it with its next gather. It may write once every other rank has entered phase
/// e too: none of them reads any more what phase e - 1 left behind. It may read once every other rank has left phase e.
/// While nobody writes, gathers wait for nothing, so that one rank may read alone. All ranks enter a phase together
/// with a new home. Same thread safety as Members.
class Phases {
 public:
  using Published = Counter RankSlot::*;
  /// Counters of the phases that a rank has entered and left.
  Phases(Members& members, Published entered, Published left) : members_(members), entered_(entered), left_(left) {}

  /// Before writing, unless `writing`.
  void begin_write(const Label& label);
  /// Before reading: tells the others that this rank's writes are done.
  void publish_writes();
  void await_readable(const Label& label);

  /// After a collective before which every rank has called `publish_writes`. If all of them were writing they go on, in
  /// a phase that they all enter at once.
  void resume(bool all_were_writing);
  bool writing() const {
    return writing_;
  }
  /// The phase entered last.
  uint64_t entered() const {
    return phase_;
  }

 private:
  Members& members_;
  Published entered_, left_;
  bool writing_ = false;
  uint64_t phase_ = 0; // entered last
  uint64_t readable_ = 0; // all ranks are known to have left it
};

/// The times in which ranks write their slices with no word to anybody, as kernels do that another compiler has made.
///
/// [Note: unseen writes] In such a time ranks are in a write phase of its own kind, beside those that writers announce.
/// All ranks enter one when backward has ended, after which nobody reads in place what is about to be written. A rank
/// is through with it when the time is over (the program says so, or its next backward begins), when it announces a
/// write after all, or when a gather finds its slices changed; a gather after that waits for the others to be through.
/// A rank whose slices are as they were has not begun: it may look at parameters alone. An exchange ends the phase, and
/// if the time lasts for all of them, all enter the next. Where a write is not certain, a rank's first gather ends the
/// time for it.
///
/// Slices in which nothing is expected to change do not tell. Such a rank goes by those that expect changes: its n-th
/// gather within the phase waits until each of them has begun its n-th too, as it would if gathers moved anything, or
/// is through; if one is, this rank is too from then on. Same thread safety as Members.
class UnseenWrites {
 public:
  explicit UnseenWrites(Members& members) : members_(members), phases_(members, &RankSlot::opened, &RankSlot::closed) {}

  /// Memory of this rank's slices, which may be written from now on. Homes go on any thread: these two are thread safe.
  void watch(const char* memory, size_t bytes);
  void forget(const char* memory);

  void begin(const ExpectedWrites& expected, const Label& label);
  void end();
  /// The phase is over for this rank, which has written or waits for all; the time may go on.
  void leave();
  /// Around a gather, of which the first tells the number: before the first look at others' memory.
  uint64_t before_gather();
  void await_others(uint64_t look, const Label& label);

  /// As in Phases: around a collective that waits for all ranks, before which they leave.
  bool last() const {
    return last_;
  }
  void resume(bool last_everywhere);

 private:
  /// At some bytes, as they were when the phase began.
  struct Glance {
    Glance(const char* memory, size_t most_bytes);
    bool differs_now() const;

    const char* memory;
    size_t bytes;
    uint64_t digest;
  };
  void glance_at_ends(const char* memory, size_t bytes);
  void expect(const std::vector<const void*>& changes);
  void begin_phase();
  bool has_written() const;
  uint64_t numbered(uint32_t look) const;
  void follow_others(uint64_t look, const Label& label);

  Members& members_;
  Phases phases_;
  mutable std::mutex mutex_; // of the next three
  std::map<const char*, size_t> slices_; // and their bytes
  std::vector<Glance> ends_; // of some of them
  std::vector<Glance> expected_; // where they will change
  bool goes_by_others_ = false;
  uint32_t looks_ = 0; // gathers of this phase
  bool last_ = false;
  bool certain_ = false;
  bool has_to_wait_ = false; // for the others, before it gathers
};

} // namespace fsdp::shm
