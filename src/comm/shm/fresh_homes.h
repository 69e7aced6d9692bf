#pragma once

#include <cstdint>
#include <vector>

#include "comm/shm/members.h"

namespace fsdp::shm {

/// One rank's progress, in shared memory, on a cache line of its own.
struct alignas(64) Progress {
  Counter value;
};

/// The homes that this rank has made and not gathered yet.
///
/// [Note: fresh homes] A new home is written before it is read for the first time, and nobody needs to wait for that: a
/// reader waits until every rank has published its first writes, by a gather of its own or, so that a rank may read
/// alone, by any collective that waits for all ranks. After such a collective the home is fresh again unless some rank
/// has read a fresh home. From then on writes and reads take turns: [Note: write phases]. Same thread safety as
/// Members.
class FreshHomes {
 public:
  /// One home's part of it.
  struct State {
    Progress* published = nullptr; ///< per rank, in the home's segment
    uint64_t needed = 0; ///< what every rank's has to reach before the home may be read
    bool fresh = false;
  };

  explicit FreshHomes(Members& members) : members_(members) {}

  void add(State& home);
  void remove(State& home);
  /// This rank's writes to a fresh home are done.
  void gathered(State& home);
  void await_readable(State& home, const Label& label) const;

  /// Before and after a collective that waits for all ranks.
  void publish();
  void resume(bool any_read_fresh);
  bool was_gathered() const {
    return was_gathered_;
  }

 private:
  void publish_one(State& home);

  Members& members_;
  std::vector<State*> homes_; // in the order in which they were made
  uint64_t round_ = 1; // one more than the collectives that waited for all ranks
  bool was_gathered_ = false; // since the last of them
};

} // namespace fsdp::shm
