#include <array>
#include <map>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "support/scoped_environment.h"
#include "support/selected.h"

namespace fsdp::testing {
namespace {

using Row = std::array<int, 4>;

std::vector<Row> all_rows() {
  std::vector<Row> all;
  for (int number = 0; number < 3 * 2 * 2 * 3; ++number) {
    all.push_back({number % 3, number / 3 % 2, number / 6 % 2, number / 12});
  }
  return all;
}

std::vector<int> options_of(const Row& row) {
  return {row.begin(), row.end()};
}

TEST(Selected, AnyTwoOptionsMeetInEveryWay) {
  const ScopedEnvironment environment(std::map<std::string, std::string>{{"FSDP_ALL_COMBINATIONS", "0"}});
  const auto some = selected(all_rows(), /*together=*/2, options_of);
  EXPECT_LT(some.size(), 13);
  std::set<uint64_t> met, wanted;
  for (const Row& row : some) {
    const auto meetings = meetings_of(options_of(row), 2);
    met.insert(meetings.begin(), meetings.end());
  }
  for (const Row& row : all_rows()) {
    const auto meetings = meetings_of(options_of(row), 2);
    wanted.insert(meetings.begin(), meetings.end());
  }
  EXPECT_EQ(wanted.size(), 3 * 2 + 3 * 2 + 3 * 3 + 2 * 2 + 2 * 3 + 2 * 3);
  EXPECT_EQ(met, wanted);
}

TEST(Selected, AllAreTakenOnRequest) {
  const ScopedEnvironment environment(std::map<std::string, std::string>{{"FSDP_ALL_COMBINATIONS", "1"}});
  EXPECT_EQ(selected(all_rows(), /*together=*/2, options_of), all_rows());
}

TEST(Selected, WhatCannotMeetIsAnError) {
  const ScopedEnvironment environment(std::map<std::string, std::string>{{"FSDP_ALL_COMBINATIONS", "0"}});
  EXPECT_THROW(selected(all_rows(), /*together=*/5, options_of), std::invalid_argument);
  EXPECT_THROW(selected(std::vector<Row>{{8, 0, 0, 0}}, /*together=*/2, options_of), std::invalid_argument);
}

} // namespace
} // namespace fsdp::testing
