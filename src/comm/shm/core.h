#pragma once

#include <memory>
#include <string>
#include <vector>

#include <fsdp/error.h>

#include "comm/shm/collectives.h"
#include "comm/shm/members.h"
#include "comm/shm/phases.h"
#include "comm/shm/reach.h"
#include "comm/shm/scratch.h"

namespace fsdp::shm {

/// What a group, its homes and its running collectives share on one rank; it goes with the last of them.
struct Core {
  Core(std::shared_ptr<Members> members_, Reach reach_);
  /// Waits until nobody reads this rank's memory any more, then leaves.
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  std::shared_ptr<Members> members;
  Reach reach;
  Collectives collectives;
  Phases phases;
  UnseenWrites unseen_writes;
  std::weak_ptr<Scratch> scratch; // while homes use it
  std::weak_ptr<void> keeps_arena; // while homes want freed blocks of the arena kept for the next step
};

using CorePointer = std::shared_ptr<Core>;

/// Meets the other ranks in a control segment that rank 0 makes, and maps their arenas; `arena`: big tensors of this
/// process may lie in its own. Calls `exchange` a fixed number of times, also when it fails; then it fails on every
/// rank.
CorePointer join(const Members::Place& place, const Exchange& exchange, bool arena = false);

// The collectives, one file each. The first two return once posted.
std::unique_ptr<Work> reduce_scatter(const CorePointer& core, ReduceScatter args, const Label& label);
std::unique_ptr<Work> all_reduce(
    const CorePointer& core, at::Tensor tensor, ReduceOp op, double divide_by, const Label& label);
void broadcast(const CorePointer& core, const at::Tensor& tensor, int root, const Label& label);

/// A collective that the caller may still wait for, until all ranks have read what is lent to them.
std::unique_ptr<Work> make_work(CorePointer core, Collectives::StepPointer last_step, Collectives::Lent lent = {});

/// Every rank's bytes; an error if they did not all come with the same number. Makes this rank's writes so far visible
/// to a rank that reads alone.
std::vector<std::string> exchange(
    const CorePointer& core, const std::string& bytes, const Label& label, uint64_t agreed = 0);

/// What `action` fails with, for the other ranks to hear; empty if it does not.
template <typename Action>
std::string complaint_of(const Action& action) {
  try {
    action();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}
/// All ranks' complaints: throws the first, on every rank.
void agree(const std::vector<std::string>& complaints);

std::shared_ptr<Home> make_home(
    const CorePointer& core, std::vector<Piece> pieces, const HomeOptions& options, const Label& label);

} // namespace fsdp::shm
