#pragma once

#include <cstdint>

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

} // namespace fsdp::shm
