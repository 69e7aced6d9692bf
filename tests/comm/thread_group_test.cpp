#include <atomic>
#include <fstream>
#include <stdexcept>
#include <system_error>
#include <thread>

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fsdp/error.h>
#include <fsdp/group.h>

#include "comm/world.h"
#include "support/ranks.h"

namespace fsdp {
namespace {

TEST(ThreadGroup, EveryThreadIsARankOfAWorldOfItsOwn) {
  std::atomic<int> ranks = 0;
  thread_group(3, [&] {
    const World* world = current_world();
    ASSERT_NE(world, nullptr);
    EXPECT_EQ(world->group->size(), 3);
    EXPECT_EQ(world->local_rank, world->group->rank());
    EXPECT_EQ(world->device, c10::Device(c10::kCPU));
    ranks += 1 << world->group->rank();
  });
  EXPECT_EQ(ranks, 7);
  EXPECT_EQ(current_world(), nullptr);
}

TEST(ThreadGroup, OfOneRunsInTheCallingThread) {
  const auto caller = std::this_thread::get_id();
  thread_group(1, [&] {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(current_world()->group->name(), "alone");
  });
  EXPECT_THROW(thread_group(1, [] { throw std::logic_error("alone"); }), std::logic_error);
  EXPECT_EQ(current_world(), nullptr);
}

TEST(ThreadGroup, TheCauseIsRethrownAndNotItsEchoes) {
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(
        thread_group(
            4,
            [] {
              const auto group = current_world()->group;
              const auto part = group->split(group->rank() % 2, {"split", ""});
              if (group->rank() == 3) {
                throw std::out_of_range("the cause");
              }
              part->barrier({"barrier", ""});
              group->barrier({"barrier", ""});
            }),
        std::out_of_range);
  }
}

TEST(ThreadGroup, ALimitMayBeAsLongAsCanBe) {
  std::atomic<int> ranks = 0;
  thread_group(
      2,
      [&] {
        const auto group = current_world()->group;
        group->barrier({"barrier", ""});
        ranks += group->rank() == 0 ? group->size() : 0;
        std::this_thread::sleep_for(std::chrono::milliseconds(group->rank() * 50)); // the other sleeps in its wait
        group->barrier({"barrier", ""});
      },
      std::chrono::milliseconds::max());
  EXPECT_EQ(ranks, 2);
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) // which use addresses of their own
// There are addresses for one stack, so that the first rank waits for the others.
TEST(ThreadGroup, WhereTheSystemHasNoMoreThreadsIsAnErrorOfTheCaller) {
  testing::on_processes(1, [] {
    constexpr size_t kStack = size_t{1} << 30;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStack);
    ASSERT_EQ(pthread_setattr_default_np(&attributes), 0);
    size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t most = pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) + kStack / 2 * 3;
    const rlimit few{.rlim_cur = most, .rlim_max = most};
    ASSERT_EQ(setrlimit(RLIMIT_AS, &few), 0);
    EXPECT_THROW(thread_group(4, [] {}), std::system_error);
  });
}
#endif

TEST(ThreadGroup, SizesBelowOneAreErrors) {
  EXPECT_THROW(thread_group(0, [] {}), Error);
}

TEST(ThreadGroup, GroupsMayBeUsedOneAfterAnother) {
  for (int round = 0; round < 20; ++round) {
    thread_group(4, [] { current_world()->group->barrier({"barrier", ""}); });
  }
}

} // namespace
} // namespace fsdp
