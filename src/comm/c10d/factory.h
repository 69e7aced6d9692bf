#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <fsdp/group.h>

namespace c10d {
class Store;
}

namespace fsdp {

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// What it takes to make a process group of some backend: a store of its own, this rank, and the number of ranks.
using MakeProcessGroup = std::function<ProcessGroupPtr(StorePtr store, int rank, int size)>;

/// Makes Gloo process groups for the CPU, and NCCL ones for this rank's GPU; null in a build without them.
MakeProcessGroup gloo_process_groups(std::chrono::milliseconds timeout);
MakeProcessGroup nccl_process_groups(c10::Device device, std::chrono::milliseconds timeout);

/// Whether this build can make Gloo groups.
inline bool gloo_available() {
  return gloo_process_groups({}) != nullptr;
}

/// A process group that ranks are about to make.
struct Joining {
  StorePtr store; ///< the new group's alone
  int rank;
  int size;
  std::chrono::milliseconds timeout;
  std::string backend; ///< for errors
  Label label;
};

/// Makes it on all ranks or on none: returns once every rank has it, and if one fails, or the time is over, all get a
/// CommError. Collective.
ProcessGroupPtr join_group(const MakeProcessGroup& make, const Joining& joining);

struct C10dOptions {
  std::chrono::milliseconds timeout;
  /// Makes the groups that `split` returns; without it the backend has to know how to split itself.
  MakeProcessGroup make_process_group = nullptr;
  /// Buffers for collectives lie in memory of the backend, if it has any to give (NCCL: registered with the network).
  bool backend_memory = false;
  /// Nobody else has the process group, nor those that it is split into.
  bool ours = false;
};

std::shared_ptr<Group> c10d_group(ProcessGroupPtr process_group, const C10dOptions& options);

/// The group of a process group that is joined first, as are those that it is split into. Collective.
std::shared_ptr<Group> join_c10d_group(const MakeProcessGroup& make, const Joining& joining);

/// Gloo's threads, which look after connections, try again and again where another thread holds a connection's lock.
/// From now on those of this process do not take the processor from that one when they wake: where ranks share cores,
/// small collectives cost half as much. Threads that the program has scheduled in a way of its own keep it.
void let_gloo_threads_stand_back();

/// Sets C10dOptions::backend_memory for all buffers to come; nothing for groups that are not c10d's.
void set_backend_memory(Group& group, bool enable);

/// The device whose tensors the group moves, if it is one of c10d's.
std::optional<c10::Device> c10d_device(const Group& group);

} // namespace fsdp
