#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <fsdp/export.h>
#include <fsdp/group.h>

namespace fsdp {

struct InitOptions {
  /// "shm", "gloo", "nccl"; empty: by device and hosts (shared memory when all ranks share one host's CPU).
  std::string backend = "";
  /// Where training runs: "cpu", "cuda", ...; empty: "cuda" where there is one, else "cpu", as with the backends
  /// "shm" and "gloo". The index comes from LOCAL_RANK.
  std::string device = "";
  /// Longest wait for another rank, in any operation. The environment variable FSDP_TIMEOUT (seconds) overrides the
  /// default.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// From the first step on, big CPU tensors come from memory that the other ranks can read (shared-memory group only).
  /// FSDP_ARENA=0 turns it off.
  bool shared_arena = true;
};

/// Joins the job that torchrun, mpirun or srun started, or makes a world of one. A second call does nothing.
FSDP_API void init(const InitOptions& options = {});
FSDP_API bool is_initialized();

FSDP_API int rank();
FSDP_API int world_size();
FSDP_API int local_rank();
/// The device that this rank trains on.
FSDP_API c10::Device device();
/// All ranks of the job.
FSDP_API const std::shared_ptr<Group>& world();

FSDP_API void barrier();
/// Leaves the job. Called at exit when the program did not; models must not be used afterwards.
FSDP_API void shutdown();

} // namespace fsdp
