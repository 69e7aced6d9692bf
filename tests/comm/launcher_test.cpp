#include "comm/launcher.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "support/error_message.h"
#include "support/scoped_environment.h"

namespace fsdp::testing {
namespace {

using Variables = std::map<std::string, std::string>;

Launch launch_with(const Variables& variables) {
  const ScopedEnvironment environment(variables);
  return read_launch();
}

std::string error_with(const Variables& variables) {
  const ScopedEnvironment environment(variables);
  return error_message([] { read_launch(); });
}

const Variables kTorchrun{
    {"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node1"}, {"MASTER_PORT", "29400"}};

const Variables kMpiexec{{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};

Variables torchrun_with(const Variables& changes) {
  Variables variables = kTorchrun;
  for (const auto& [name, value] : changes) {
    variables[name] = value;
  }
  return variables;
}

Variables torchrun_without(const std::string& name) {
  Variables variables = kTorchrun;
  variables.erase(name);
  return variables;
}

TEST(Launcher, NoVariablesMeanAWorldOfOne) {
  const Launch launch = launch_with({});
  EXPECT_EQ(launch.launcher, "none");
  EXPECT_EQ(launch.size, 1);
  EXPECT_EQ(launch.rank, 0);
}

TEST(Launcher, ReadsTorchrun) {
  const Launch launch = launch_with(kTorchrun);
  EXPECT_EQ(launch.launcher, "torchrun");
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.size, 4);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.address, "node1");
  EXPECT_EQ(launch.port, 29400);
  EXPECT_FALSE(launch.agent_store);
}

TEST(Launcher, ReadsTorchrunsAgentStore) {
  const Launch launch =
      launch_with(torchrun_with({{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "2"}}));
  EXPECT_TRUE(launch.agent_store);
  EXPECT_EQ(launch.attempt, 2);
}

TEST(Launcher, JobsHaveNamesOfTheirOwn) {
  EXPECT_EQ(launch_with(kTorchrun).job, "");
  EXPECT_EQ(launch_with(torchrun_with({{"TORCHELASTIC_RUN_ID", "run 7"}})).job, "run 7");
  EXPECT_EQ(launch_with(torchrun_with({{"TORCHELASTIC_RUN_ID", "run 7"}, {"FSDP_JOB_ID", "mine"}})).job, "mine");
  EXPECT_EQ(launch_with(torchrun_with({{"SLURM_JOB_ID", "77"}})).job, "") << "ranks by hand may be of several";
}

TEST(Launcher, RanksOfOneParentAreAJob) {
  const std::string job = launch_with(kMpiexec).job;
  EXPECT_FALSE(job.empty());
  EXPECT_EQ(launch_with(kMpiexec).job, job);
}

TEST(Launcher, AWorldOfOneNeedsNoAddress) {
  const Launch launch = launch_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(launch.size, 1);
  EXPECT_EQ(launch.local_rank, std::nullopt);
}

TEST(Launcher, HalfSetVariablesAreErrorsThatNameThem) {
  for (const std::string name : {"WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    EXPECT_TRUE(contains(error_with(torchrun_without(name)), name));
  }
  EXPECT_TRUE(contains(error_with({{"OMPI_COMM_WORLD_RANK", "0"}}), "OMPI_COMM_WORLD_SIZE"));
  EXPECT_TRUE(contains(error_with({{"PMI_SIZE", "2"}}), "PMI_RANK"));
}

TEST(Launcher, MalformedVariablesAreErrorsThatNameThem) {
  EXPECT_TRUE(contains(error_with(torchrun_with({{"RANK", "first"}})), "RANK"));
  EXPECT_TRUE(contains(error_with(torchrun_with({{"WORLD_SIZE", "0"}})), "WORLD_SIZE"));
  EXPECT_TRUE(contains(error_with(torchrun_with({{"WORLD_SIZE", "4x"}})), "WORLD_SIZE"));
  EXPECT_TRUE(contains(error_with(torchrun_with({{"LOCAL_RANK", "-1"}})), "LOCAL_RANK"));
  EXPECT_TRUE(contains(error_with(torchrun_with({{"MASTER_PORT", "70000"}})), "MASTER_PORT"));
  const std::string message = error_with(torchrun_with({{"RANK", "4"}}));
  EXPECT_TRUE(contains(message, "RANK below WORLD_SIZE=4"));
  EXPECT_TRUE(contains(message, "got 4"));
}

TEST(Launcher, ReadsMpirunOnOneHost) {
  const Variables variables{
      {"OMPI_COMM_WORLD_RANK", "1"},
      {"OMPI_COMM_WORLD_SIZE", "2"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
      {"PMIX_NAMESPACE", "prte-1234@1"}};
  const Launch launch = launch_with(variables);
  EXPECT_EQ(launch.launcher, "mpirun");
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.address, "127.0.0.1");
  EXPECT_EQ(launch.port, 0) << "one that cannot be foretold";
  EXPECT_EQ(launch.job, "prte-1234@1");
  EXPECT_FALSE(launch.agent_store);
}

TEST(Launcher, MpirunOnSeveralHostsNeedsAnAddress) {
  Variables variables{
      {"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  const std::string message = error_with(variables);
  EXPECT_TRUE(contains(message, "MASTER_ADDR"));
  EXPECT_TRUE(contains(message, "mpirun -x"));
  variables["MASTER_ADDR"] = "node7";
  EXPECT_TRUE(contains(error_with(variables), "MASTER_PORT"));
  variables["PMIX_NAMESPACE"] = "prte-1234@1";
  const auto port = launch_with(variables).port;
  EXPECT_GE(port, 20000);
  EXPECT_LT(port, 30000);
  EXPECT_EQ(launch_with(variables).port, port); // all ranks derive the same
  variables["PMIX_NAMESPACE"] = "prte-1235@1";
  EXPECT_NE(launch_with(variables).port, port);
  variables["MASTER_PORT"] = "1234";
  EXPECT_EQ(launch_with(variables).address, "node7");
  EXPECT_EQ(launch_with(variables).port, 1234);
}

TEST(Launcher, ReadsMpiexec) {
  const Launch launch = launch_with(kMpiexec);
  EXPECT_EQ(launch.launcher, "mpiexec");
  EXPECT_EQ(launch.size, 2);
  EXPECT_EQ(launch.address, "127.0.0.1");
}

const Variables kSrun{
    {"SLURM_PROCID", "5"},
    {"SLURM_NTASKS", "8"},
    {"SLURM_LOCALID", "1"},
    {"SLURM_JOB_ID", "77"},
    {"SLURM_STEP_ID", "0"},
    {"SLURM_STEP_NUM_NODES", "2"},
    {"SLURM_NODELIST", "gpu[03-04]"}};

TEST(Launcher, ReadsSrun) {
  const Launch launch = launch_with(kSrun);
  EXPECT_EQ(launch.launcher, "srun");
  EXPECT_EQ(launch.rank, 5);
  EXPECT_EQ(launch.size, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.address, "gpu03");
  EXPECT_EQ(launch.job, "77.0");
}

TEST(Launcher, SrunOnOneHostNeedsNoNames) {
  Variables variables = kSrun;
  variables["SLURM_STEP_NUM_NODES"] = "1";
  EXPECT_EQ(launch_with(variables).address, "127.0.0.1");
}

TEST(Launcher, ABatchScriptIsNoRank) {
  Variables variables = kSrun;
  variables["SLURM_STEP_ID"] = "4294967291";
  EXPECT_EQ(launch_with(variables).launcher, "none");
}

// Whose proxies srun starts, one a host.
TEST(Launcher, MpiexecWithinAJobOfSlurmIsNoSrun) {
  Variables variables = kSrun;
  variables.insert(kMpiexec.begin(), kMpiexec.end());
  const Launch launch = launch_with(variables);
  EXPECT_EQ(launch.launcher, "mpiexec");
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.size, 2);
}

TEST(Launcher, TwoMpiexecWithinOneJobOfSlurmAreTwoJobs) {
  Variables variables = kMpiexec;
  variables["SLURM_JOB_ID"] = "77";
  EXPECT_EQ(launch_with(variables).job, launch_with(kMpiexec).job) << "by who started the ranks";
  EXPECT_TRUE(contains(launch_with(variables).job, std::to_string(getppid())));
}

TEST(Launcher, TorchrunsVariablesGoFirst) {
  Variables variables = kTorchrun;
  variables.insert(kSrun.begin(), kSrun.end());
  EXPECT_EQ(launch_with(variables).launcher, "torchrun");
}

TEST(Launcher, FindsTheFirstHostOfANodeList) {
  EXPECT_EQ(first_host("login"), "login");
  EXPECT_EQ(first_host("a,b,c"), "a");
  EXPECT_EQ(first_host("gpu[03-05,9],login"), "gpu03");
  EXPECT_EQ(first_host("gpu[7]"), "gpu7");
  EXPECT_EQ(first_host("login,gpu[03-05]"), "login");
  EXPECT_EQ(first_host("rack[1-2]-ib,x"), "rack1-ib");
}

} // namespace
} // namespace fsdp::testing
