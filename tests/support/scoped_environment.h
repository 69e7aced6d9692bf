#pragma once

#include <cstdlib>
#include <map>
#include <optional>
#include <string>

namespace fsdp::testing {

/// Environment variables with other values for a scope; those that any launcher sets are unset.
class ScopedEnvironment {
 public:
  explicit ScopedEnvironment(const std::map<std::string, std::string>& values) {
    for (const char* name :
         {"RANK",
          "WORLD_SIZE",
          "LOCAL_RANK",
          "LOCAL_WORLD_SIZE",
          "MASTER_ADDR",
          "MASTER_PORT",
          "TORCHELASTIC_USE_AGENT_STORE",
          "TORCHELASTIC_RESTART_COUNT",
          "TORCHELASTIC_RUN_ID",
          "FSDP_JOB_ID",
          "OMPI_COMM_WORLD_RANK",
          "OMPI_COMM_WORLD_SIZE",
          "OMPI_COMM_WORLD_LOCAL_RANK",
          "OMPI_COMM_WORLD_LOCAL_SIZE",
          "PMIX_NAMESPACE",
          "OMPI_MCA_ess_base_jobid",
          "PMI_RANK",
          "PMI_SIZE",
          "PMI_JOBID",
          "MPI_LOCALRANKID",
          "MPI_LOCALNRANKS",
          "SLURM_PROCID",
          "SLURM_NTASKS",
          "SLURM_LOCALID",
          "SLURM_STEP_ID",
          "SLURM_JOB_ID",
          "SLURM_NNODES",
          "SLURM_STEP_NUM_NODES",
          "SLURM_NODELIST",
          "SLURM_STEP_NODELIST",
          "SLURM_JOB_NODELIST",
          "SLURM_LAUNCH_NODE_IPADDR",
          "FSDP_TIMEOUT"}) {
      remember(name);
      unsetenv(name);
    }
    for (const auto& [name, value] : values) {
      remember(name);
      setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
    }
  }

  ~ScopedEnvironment() {
    for (const auto& [name, value] : before_) {
      value ? setenv(name.c_str(), value->c_str(), /*overwrite=*/1) : unsetenv(name.c_str());
    }
  }

  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  void remember(const std::string& name) {
    const char* value = std::getenv(name.c_str());
    before_.emplace(name, value ? std::optional<std::string>(value) : std::nullopt);
  }

  std::map<std::string, std::optional<std::string>> before_;
};

} // namespace fsdp::testing
