#include <atomic>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/group.h>

#include "comm/world.h"

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
