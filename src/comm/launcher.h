#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp {

/// This process's place in the job, as its launcher's environment variables tell it.
struct Launch {
  std::string launcher = "none"; ///< "torchrun", "mpirun", "mpiexec", "srun", or "none": a world of one
  int rank = 0;
  int size = 1;
  std::optional<int> local_rank; ///< not every launcher tells
  std::string address; ///< where the rendezvous store listens; empty in a world of one
  uint16_t port = 0; ///< 0: rank 0 takes one that is free, and tells the others, who are on its host
  std::string job; ///< the same on all ranks, and another in every other job, as far as the launcher tells; or empty
  /// The store is served by the launcher (torchrun's agent), not by rank 0.
  bool agent_store = false;
  /// Starts of the same job that share one store (torchrun's restarts) are told apart by it.
  int attempt = 0;
};

/// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (torchrun and all that do as it does), else
/// OMPI_COMM_WORLD_* (mpirun), else SLURM_* (srun), else PMI_* (mpiexec). An Error names the variable that is missing
/// or malformed.
Launch read_launch();

/// The first host of a list in Slurm's notation: "gpu[03-05,9],login" gives "gpu03".
std::string first_host(const std::string& node_list);

} // namespace fsdp
