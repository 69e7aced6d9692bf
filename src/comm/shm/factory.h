#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/group.h>

namespace fsdp {

/// An all-gather of small strings among the ranks, over whatever rendezvous there is. Used for set-up only.
using Exchange = std::function<std::vector<std::string>(const std::string& mine)>;

struct ShmOptions {
  /// Longest wait for another rank.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Serve big CPU tensors of this process from memory that the other ranks can read.
  bool arena = true;
};

/// Whether all ranks see each other's memory: one host, one pid namespace, readable /proc/<pid>/fd.
/// Collective: every rank gets the same answer.
bool shm_available(const Exchange& exchange);

/// The ranks of one host, joined by shared memory. Collective. Ranks may be processes or threads.
std::shared_ptr<Group> shm_group(int rank, int size, const Exchange& exchange, const ShmOptions& options = {});

} // namespace fsdp
