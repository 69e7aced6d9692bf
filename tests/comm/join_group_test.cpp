#include "comm/c10d/factory.h"

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <fsdp/error.h>

#include "support/error_message.h"

namespace fsdp::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Ranks are threads; what they make is nothing, in ways that the tests choose.
struct JoinGroup : ::testing::Test {
  ProcessGroupPtr join(int rank, std::function<void()> make, milliseconds timeout = seconds(60)) {
    const auto making = [make = std::move(make)](const StorePtr&, int, int) -> ProcessGroupPtr {
      make();
      return nullptr;
    };
    return join_group(
        making,
        {.store = store,
         .rank = rank,
         .size = 2,
         .timeout = timeout,
         .backend = "paper",
         .label = {"split", "a mesh"}});
  }

  StorePtr store = c10::make_intrusive<c10d::HashStore>();
};

/// Makers that never end, until the test does. Shared with them, as they outlive it.
struct Gate {
  std::promise<void> opened;
  std::shared_future<void> open = opened.get_future().share();
};

TEST_F(JoinGroup, NoRankHasItBeforeAllHave) {
  std::promise<void> first_made;
  std::atomic<bool> first_has_it{false};
  std::thread first([&] {
    join(0, [&] { first_made.set_value(); });
    first_has_it = true;
  });
  join(1, [&] {
    first_made.get_future().wait();
    std::this_thread::sleep_for(milliseconds(300)); // in which the first could return
    EXPECT_FALSE(first_has_it);
  });
  first.join();
}

TEST_F(JoinGroup, OneThatFailsEndsTheOthersLongBeforeTheTimeout) {
  const auto gate = std::make_shared<Gate>();
  std::string heard;
  std::thread other([&] {
    heard = error_message<CommError>([&] {
      join(
          0, [gate] { gate->open.wait(); }, seconds(600));
    });
  });
  const auto said = error_message<CommError>([&] {
    join(
        1, [] { throw std::runtime_error("the cable is out"); }, seconds(600));
  });
  other.join();
  gate->opened.set_value();
  EXPECT_TRUE(contains(said, "[split] rank 1 of 2 could not make the paper group for 'a mesh': the cable is out"));
  EXPECT_TRUE(contains(heard, "[split] rank 0 of 2 could not make the paper group"));
  EXPECT_TRUE(contains(heard, "rank 1 gave up"));
  EXPECT_TRUE(contains(heard, "the cable is out"));
}

TEST_F(JoinGroup, AMakingThatNeverEndsIsGivenUp) {
  const auto gate = std::make_shared<Gate>();
  const auto said = error_message<CommError>([&] {
    join(
        0, [gate] { gate->open.wait(); }, milliseconds(400));
  });
  gate->opened.set_value();
  EXPECT_TRUE(contains(said, "it took longer than 0.4 s"));
  EXPECT_TRUE(contains(said, "rank 1 has not been seen at it"));
}

TEST_F(JoinGroup, ARankThatDoesNotComeIsNamed) {
  const auto said = error_message<CommError>([&] {
    join(
        0, [] {}, milliseconds(400));
  });
  EXPECT_TRUE(contains(said, "rank 1 has not been seen at it"));
}

} // namespace
} // namespace fsdp::testing
