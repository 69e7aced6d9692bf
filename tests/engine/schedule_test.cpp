#include "engine/schedule.h"

#include <gtest/gtest.h>

namespace fsdp::engine {
namespace {

constexpr auto kF = Phase::kForward;
constexpr auto kB = Phase::kBackward;
using Units = std::vector<int>;

Units upcoming(const Schedule& schedule, size_t count) {
  Units units;
  for (const auto& touch : schedule.upcoming(count)) {
    units.push_back(touch.unit);
  }
  return units;
}

void run(Schedule& schedule, std::vector<Schedule::Touch> step) {
  for (const auto& touch : step) {
    schedule.touched(touch);
  }
}

const std::vector<Schedule::Touch> kStep{{0, kF}, {1, kF}, {2, kF}, {2, kB}, {1, kB}, {0, kB}};

TEST(Schedule, KnowsNothingInTheFirstStep) {
  Schedule schedule;
  schedule.touched({0, kF});
  EXPECT_FALSE(schedule.known());
  EXPECT_TRUE(upcoming(schedule, 2).empty());
}

TEST(Schedule, ExpectsTheLastStepAgain) {
  Schedule schedule;
  run(schedule, kStep);
  schedule.end_step();
  schedule.touched({0, kF});
  EXPECT_TRUE(schedule.known());
  EXPECT_EQ(upcoming(schedule, 1), Units({1}));
  EXPECT_EQ(upcoming(schedule, 5), Units({1, 2}));
  schedule.touched({1, kF});
  schedule.touched({2, kF});
  EXPECT_EQ(upcoming(schedule, 1), Units({1})); // its own backward comes first, but it is here already
}

TEST(Schedule, AnotherPathIsExpectedOfTheNextStep) {
  Schedule schedule;
  run(schedule, kStep);
  schedule.end_step();
  run(schedule, {{0, kF}, {2, kF}});
  EXPECT_FALSE(schedule.known());
  run(schedule, {{2, kB}, {0, kB}});
  schedule.end_step();
  schedule.touched({0, kF});
  EXPECT_EQ(upcoming(schedule, 3), Units({2}));
}

TEST(Schedule, FindsBackAfterADetour) {
  Schedule schedule;
  run(schedule, kStep);
  schedule.end_step();
  run(schedule, {{0, kF}, {5, kF}});
  EXPECT_FALSE(schedule.known());
  run(schedule, {{2, kF}, {2, kB}});
  EXPECT_TRUE(schedule.known());
  EXPECT_EQ(upcoming(schedule, 1), Units({1}));
}

TEST(Schedule, ARepeatedForwardStartsOver) {
  Schedule schedule;
  run(schedule, kStep);
  schedule.end_step();
  run(schedule, {{0, kF}, {1, kF}, {2, kF}, {0, kF}});
  EXPECT_TRUE(schedule.known());
  EXPECT_EQ(upcoming(schedule, 2), Units({1, 2}));
}

TEST(Schedule, ABrokenStepTeachesNothing) {
  Schedule schedule;
  run(schedule, kStep);
  schedule.end_step();
  run(schedule, {{0, kF}, {2, kF}});
  schedule.abandon_step();
  schedule.touched({0, kF});
  EXPECT_EQ(upcoming(schedule, 1), Units({1}));
}

TEST(Schedule, EvaluationRepeatsWithoutAnEnd) {
  Schedule schedule(/*repeats=*/true);
  run(schedule, {{0, kF}, {1, kF}, {2, kF}, {0, kF}});
  EXPECT_TRUE(schedule.known());
  EXPECT_EQ(upcoming(schedule, 1), Units({1}));
  run(schedule, {{1, kF}, {2, kF}});
  EXPECT_EQ(upcoming(schedule, 2), Units({})); // nobody has said that there is another
}

} // namespace
} // namespace fsdp::engine
