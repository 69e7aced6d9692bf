#include <fsdp/group.h>

#include <fstream>
#include <functional>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/shm/arena.h"
#include "comm/shm_backends.h"

namespace fsdp::testing {
namespace {

TEST(ShmAvailable, TrueAmongThreadsAndProcesses) {
  on_threads(3, [] {
    const auto group = current_world()->group;
    EXPECT_TRUE(shm_available([&](const std::string& mine) { return group->exchange(mine, kTest); }));
  });
  on_processes(2, [] { EXPECT_TRUE(shm_available(FileExchange(process_folder(), process_rank(), 2))); });
}

// As if rank 1 ran on another host: its process number and descriptor mean something else here.
TEST(ShmAvailable, FalseOnEveryRankIfOneIsElsewhere) {
  on_threads(3, [] {
    const auto group = current_world()->group;
    int round = 0;
    const auto distorted = [&](const std::string& mine) {
      auto all = group->exchange(mine, kTest);
      if (round++ == 0 && group->rank() == 2) {
        all[1][8] ^= 1; // another device
        all[1].back() = all[1].back() == '0' ? '1' : '0';
      }
      return all;
    };
    EXPECT_FALSE(shm_available(distorted));
  });
}

// As in dry runs, with a process group that moves nothing.
TEST(ShmAvailable, FalseWhereNobodyElseAnswers) {
  EXPECT_FALSE(shm_available([](const std::string& mine) { return std::vector<std::string>(4, mine); }));
}

std::vector<std::string> alone(const std::string& mine) {
  return {mine};
}

TEST(ShmAvailable, FalseInAForkedChildOfARank) {
  on_processes(1, [] {
    EXPECT_TRUE(shm_available(&alone));
    const pid_t child = fork();
    if (child == 0) {
      _exit(shm_available(&alone) ? 1 : 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  });
}

size_t addresses_in_use() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

void leave_addresses_for(size_t bytes) {
  const rlim_t most = addresses_in_use() + bytes;
  const rlimit few{.rlim_cur = most, .rlim_max = most};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &few), 0);
}

// A scheduler's limit on addresses. What does not suffice for all is left to the program.
TEST(ShmAvailable, FalseWhereTheArenasOfAllRanksDoNotFit) {
  for (const size_t halves : {1, 3, 5}) {
    on_processes(2, [&] {
      FileExchange exchange(process_folder(), process_rank(), 2);
      leave_addresses_for(halves * shm::Arena::wanted_bytes() / 2);
      const size_t before = addresses_in_use();
      EXPECT_FALSE(shm_available(std::ref(exchange)));
      EXPECT_LT(addresses_in_use(), before + shm::Arena::wanted_bytes() / 8);
    });
  }
}

TEST(ShmAvailable, FalseWhereTheyDoNotFitAnyMore) {
  on_processes(2, [] {
    FileExchange exchange(process_folder(), process_rank(), 2);
    EXPECT_TRUE(shm_available(std::ref(exchange)));
    leave_addresses_for(shm::Arena::wanted_bytes() / 2);
    EXPECT_FALSE(shm_available(std::ref(exchange)));
  });
}

} // namespace
} // namespace fsdp::testing
