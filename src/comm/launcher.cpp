#include "comm/launcher.h"

#include <functional>
#include <limits>
#include <vector>

#include <unistd.h>

#include "base/check.h"
#include "base/env.h"
#include "comm/process.h"

namespace fsdp {
namespace {

constexpr const char* kInit = "init";
constexpr int64_t kMaxRanks = std::numeric_limits<int>::max();
// Slurm numbers the steps that srun did not start (batch script, interactive shell) from here; they run once, not once
// per task.
constexpr int64_t kFirstSpecialStep = 0xfffffff0;

// Several hosts derive the port from the job. Such ports lie below the range that systems hand out to clients.
constexpr uint16_t kFirstPort = 20000;
constexpr uint16_t kPorts = 10000;

/// The names under which a launcher tells the same things.
struct Names {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size; ///< ranks on this host
};

constexpr Names kTorchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpi{
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names kSlurm{"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr};
constexpr Names kPmi{"mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};

bool is_set(const char* name) {
  return env::string(name).has_value();
}

bool started_by(const Names& names) {
  if (&names != &kSlurm) {
    return is_set(names.rank) || is_set(names.size);
  }
  if (is_set(kPmi.rank) && is_set(kPmi.local_rank)) {
    return false; // srun started mpiexec's proxies, one a host, and these the ranks
  }
  const auto step = env::integer("SLURM_STEP_ID");
  return is_set(names.rank) && is_set(names.size) && (!step || *step < kFirstSpecialStep);
}

std::optional<int> optional_int(const char* name) {
  const auto value = name ? env::integer(name, 0, kMaxRanks) : std::nullopt;
  return value ? std::optional(static_cast<int>(*value)) : std::nullopt;
}

void require_other(const char* name, const char* present, const char* launcher) {
  FSDP_CHECK(
      is_set(name),
      "[init] expected {} beside {}, but it is not set; start the program with {}, set {}, or unset {} to train alone",
      name,
      present,
      launcher,
      name,
      present);
}

Launch read_ranks(const Names& names) {
  require_other(names.size, names.rank, names.launcher);
  require_other(names.rank, names.size, names.launcher);
  Launch launch;
  launch.launcher = names.launcher;
  launch.size = static_cast<int>(env::required_integer(names.size, kInit, 1, kMaxRanks));
  launch.rank = static_cast<int>(env::required_integer(names.rank, kInit, 0, kMaxRanks));
  FSDP_CHECK(
      launch.rank < launch.size,
      "[init] expected {} below {}={}, got {}; ranks count from 0",
      names.rank,
      names.size,
      launch.size,
      launch.rank);
  launch.local_rank = optional_int(names.local_rank);
  return launch;
}

bool on_one_host(const Names& names, int size) {
  if (names.local_size) {
    return optional_int(names.local_size).value_or(0) == size;
  }
  const auto nodes = env::integer("SLURM_STEP_NUM_NODES", 1);
  return nodes.value_or(env::integer("SLURM_NNODES", 1).value_or(0)) == 1;
}

/// What all ranks of the job know and no other job has.
std::optional<std::string> job_id(const Names& names) {
  if (&names == &kTorchrun) {
    return env::string("TORCHELASTIC_RUN_ID"); // ranks by hand may be of several jobs of a batch system
  }
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"}) {
    if (const auto id = env::string(name)) {
      return *id;
    }
  }
  if (const auto job = env::string("SLURM_JOB_ID")) {
    return phrase("{}.{}", *job, env::string("SLURM_STEP_ID").value_or("0"));
  }
  return std::nullopt;
}

/// The same on this host, where one process has started all ranks.
std::string job_started_by(int32_t process) {
  return phrase("{}.{}.{}", getuid(), process, process_start(process).value_or(0));
}

/// The launcher's process on this host, though a script of the user's may stand between.
std::optional<int32_t> starter(const Names& names) {
  std::vector<std::string> given;
  for (const char* name : {names.rank, names.size, names.local_rank}) {
    if (const auto value = env::string(name)) {
      given.push_back(phrase("{}={}", name, *value));
    }
  }
  return giver_of(given);
}

uint16_t port_of(const std::string& job) {
  return static_cast<uint16_t>(kFirstPort + std::hash<std::string>()(job) % kPorts);
}

std::string first_slurm_host() {
  // Rank 0 runs on the first host of the list. The address of the launching host is a guess, right inside sbatch.
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"}) {
    if (const auto list = env::string(name)) {
      return first_host(*list);
    }
  }
  return env::string("SLURM_LAUNCH_NODE_IPADDR").value_or("");
}

std::string address_of_rank_zero(const Names& names, int size) {
  if (const auto address = env::string("MASTER_ADDR")) {
    return *address;
  }
  if (&names == &kTorchrun) {
    return env::required_string("MASTER_ADDR", kInit);
  }
  if (on_one_host(names, size)) {
    return "127.0.0.1";
  }
  const std::string host = &names == &kSlurm ? first_slurm_host() : "";
  FSDP_CHECK(
      !host.empty(),
      "[init] expected MASTER_ADDR, as {} started ranks on several hosts and does not tell where rank 0 is; set "
      "MASTER_ADDR to rank 0's host on all ranks (mpirun -x MASTER_ADDR=host, mpiexec -genv MASTER_ADDR host)",
      names.launcher);
  return host;
}

uint16_t rendezvous_port(const Names& names, int size) {
  if (&names == &kTorchrun || is_set("MASTER_PORT")) {
    return static_cast<uint16_t>(env::required_integer("MASTER_PORT", kInit, 1, 65535));
  }
  if (on_one_host(names, size)) {
    return 0;
  }
  const auto job = job_id(names);
  FSDP_CHECK(
      job,
      "[init] expected MASTER_PORT, as {} started ranks on several hosts and gives them no job id from which to choose "
      "the same port; set MASTER_PORT to a free port of rank 0's host on all ranks (mpiexec -genv MASTER_PORT 29500)",
      names.launcher);
  return port_of(*job);
}

std::string job_of(const Names& names, int size) {
  if (const auto id = env::string("FSDP_JOB_ID")) {
    return *id;
  }
  const bool has_one_starter = &names != &kTorchrun && on_one_host(names, size);
  if (has_one_starter && &names == &kPmi) { // which gives no id, and a job of Slurm may start it many times
    if (const auto process = starter(names)) {
      return job_started_by(*process);
    }
  }
  return job_id(names).value_or(has_one_starter ? job_started_by(getppid()) : "");
}

Launch read_job(const Names& names) {
  Launch launch = read_ranks(names);
  if (launch.size == 1) {
    return launch;
  }
  launch.address = address_of_rank_zero(names, launch.size);
  launch.port = rendezvous_port(names, launch.size);
  launch.job = job_of(names, launch.size);
  if (&names == &kTorchrun) {
    launch.agent_store = env::flag("TORCHELASTIC_USE_AGENT_STORE").value_or(false);
    launch.attempt = optional_int("TORCHELASTIC_RESTART_COUNT").value_or(0);
  }
  return launch;
}

} // namespace

std::string first_host(const std::string& node_list) {
  const size_t comma = node_list.find(',');
  const size_t open = node_list.find('[');
  if (open == std::string::npos || comma < open) {
    return node_list.substr(0, comma);
  }
  const size_t close = node_list.find(']', open);
  const size_t number_end = node_list.find_first_of("-,]", open);
  if (close == std::string::npos) {
    return "";
  }
  const std::string number = node_list.substr(open + 1, number_end - open - 1);
  const std::string after = node_list.substr(close + 1, node_list.find(',', close) - close - 1);
  return node_list.substr(0, open) + number + after;
}

Launch read_launch() {
  for (const Names* names : {&kTorchrun, &kOpenMpi, &kSlurm, &kPmi}) {
    if (started_by(*names)) {
      return read_job(*names);
    }
  }
  return {};
}

} // namespace fsdp
