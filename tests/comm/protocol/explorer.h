#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/shm/control.h"

/// Runs the ranks of a program in every order that can make a difference, one step of one rank at a time.
///
/// [Note: every order] A step ends before an access to shared memory that others' accesses could meet. Orders are tried
/// by running the program again and again, each time with another choice somewhere (depth first), until a state comes
/// up that was seen before. A state is what lies in shared memory and, for each rank, the operation that it is in and
/// what it has read there since: its code does the rest. Memory is sequentially consistent here, whatever order is
/// asked for.
namespace fsdp::testing {

/// A change to the library that makes one rank go wrong.
struct Mistake {
  enum class Kind {
    kNone,
    kNeverSet, ///< the rank does not set its counter
    kNotAwaited, ///< it takes the others' counters as reached
    kSetTooEarly, ///< it sets the counter before it writes what the counter promises
    kDeathIgnored, ///< no rank sees that a process has ended
    kSleepsUnannounced, ///< it does not say that it has to be woken
  };
  Kind kind = Kind::kNone;
  shm::Counter shm::RankSlot::*counter = nullptr;
  int rank = 1;
};

struct ExplorerOptions {
  int ranks = 3;
  bool may_fail = false; ///< ranks may end in a CommError
  int mortal = -1; ///< this rank may die before any of its steps
  bool wake_ups = false; ///< also the steps of falling asleep and being woken
  Mistake mistake{};
};

struct Explored {
  int64_t states = 0;
  int64_t runs = 0;
  int64_t errors = 0; ///< ranks that ended in a CommError
  std::string violation; ///< empty: none; else what, and the steps that led there
};

/// `program` is run by each rank, in a fiber. What it throws ends the rank.
Explored explore(const ExplorerOptions& options, const std::function<void()>& program);

/// For programs.
namespace exploring {
int rank();
int ranks();
/// Meets the other ranks, in any order. Until `start` only one order is tried.
std::vector<std::string> exchange(const std::string& mine);
void start();
/// The next operation of the program begins: what the rank has read before does not matter any more, unless something
/// is still on its way.
void operation(bool on_its_way = false);
/// A step ends here: others may go on before the program does.
void pause();
/// Ends the exploration.
[[noreturn]] void violate(const std::string& what);
} // namespace exploring

} // namespace fsdp::testing
