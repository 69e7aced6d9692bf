#include "comm/within_limit.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace fsdp::testing {
namespace {

using std::chrono::milliseconds;

TEST(WithinLimit, GivesWhatIsSaidInTime) {
  EXPECT_EQ(within_limit<int>(std::chrono::seconds(60), [] { return 7; }), 7);
  EXPECT_THROW(within_limit<int>(std::chrono::seconds(60), []() -> int { throw std::string("x"); }), std::string);
}

TEST(WithinLimit, GivesNothingAfterThat) {
  std::promise<void> end;
  EXPECT_EQ(
      within_limit<int>(
          milliseconds(20),
          [over = end.get_future().share()] {
            over.wait();
            return 7;
          }),
      std::nullopt);
  end.set_value();
}

using BackgroundDeathTest = ::testing::Test;

// It may use what libraries take down at exit.
TEST_F(BackgroundDeathTest, WorkEndsBeforeTheProcessTakesItsThingsDown) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        in_background([] {
          std::this_thread::sleep_for(milliseconds(20));
          std::fputs("finished", stderr);
        });
        std::exit(0);
      },
      ::testing::ExitedWithCode(0),
      "finished");
}

TEST_F(BackgroundDeathTest, AForkedChildsWorkEndsBeforeItToo) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        in_background([] { std::this_thread::sleep_for(std::chrono::hours(1)); });
        const pid_t child = fork();
        if (child == 0) {
          in_background([] {
            std::this_thread::sleep_for(milliseconds(500));
            std::fputs("finished", stderr);
          });
          std::exit(0);
        }
        waitpid(child, nullptr, 0);
        _exit(0);
      },
      ::testing::ExitedWithCode(0),
      "finished");
}

TEST_F(BackgroundDeathTest, WorkThatNeverEndsDoesNotHoldTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        in_background([] { std::this_thread::sleep_for(std::chrono::hours(1)); });
        std::exit(0);
      },
      ::testing::ExitedWithCode(0),
      "");
}

} // namespace
} // namespace fsdp::testing
