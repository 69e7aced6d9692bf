#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <sched.h>

#include "comm/gloo_group.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

std::vector<int> gloo_threads() {
  std::vector<int> threads;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(thread.path() / "comm"), name);
    if (name == "gloo_tcp_loop") {
      threads.push_back(std::atoi(thread.path().filename().c_str()));
    }
  }
  return threads;
}

TEST(GlooThreads, DoNotTakeTheProcessorFromWhoHoldsALock) {
  if (!gloo_available()) {
    GTEST_SKIP() << "built without Gloo";
  }
  on_processes(2, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const auto group = gloo_group(rendezvous, launch, std::chrono::seconds(60));
    ASSERT_FALSE(gloo_threads().empty());
    for (const int thread : gloo_threads()) {
      EXPECT_EQ(sched_getscheduler(thread), SCHED_BATCH);
    }
    EXPECT_EQ(sched_getscheduler(0), SCHED_OTHER) << "the program's own thread";
    const sched_param usual{};
    sched_setscheduler(gloo_threads()[0], SCHED_IDLE, &usual);
    let_gloo_threads_stand_back();
    EXPECT_EQ(sched_getscheduler(gloo_threads()[0]), SCHED_IDLE) << "as the program wants it";
    rendezvous.leave(std::chrono::seconds(10));
  });
}

} // namespace
} // namespace fsdp::testing
