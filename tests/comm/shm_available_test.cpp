#include <fsdp/group.h>

#include <gtest/gtest.h>

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

} // namespace
} // namespace fsdp::testing
