#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string_view>
#include <unordered_set>
#include <vector>

/// A few of all combinations of options, in which as many options as wanted meet in every way that they can.
namespace fsdp::testing {

/// FSDP_ALL_COMBINATIONS=1: nothing is left out.
inline bool wants_all_combinations() {
  const char* wanted = std::getenv("FSDP_ALL_COMBINATIONS");
  return wanted != nullptr && std::string_view(wanted) == "1";
}

/// Which options meet how in a combination, of which each option's value is below 8: numbers, one for each meeting.
inline std::vector<uint64_t> meetings_of(const std::vector<int>& options, int together) {
  if (together < 1 || together > static_cast<int>(options.size()) ||
      std::any_of(options.begin(), options.end(), [](int value) { return value < 0 || value > 7; })) {
    throw std::invalid_argument("so many options cannot meet, or one has more values than 8");
  }
  std::vector<uint64_t> meetings;
  for (unsigned which = 0; which < 1u << options.size(); ++which) {
    if (std::popcount(which) == together) {
      uint64_t meeting = which;
      for (size_t i = 0; i < options.size(); ++i) {
        meeting = (which >> i & 1) != 0 ? meeting * 8 + static_cast<uint64_t>(options[i]) : meeting;
      }
      meetings.push_back(meeting);
    }
  }
  return meetings;
}

/// `options_of`: a combination's options as small numbers. Takes that next in which most meet for the first time.
template <typename Combination, typename OptionsOf>
std::vector<Combination> selected(const std::vector<Combination>& all, int together, const OptionsOf& options_of) {
  if (wants_all_combinations()) {
    return all;
  }
  std::vector<std::vector<uint64_t>> meetings;
  for (const Combination& each : all) {
    meetings.push_back(meetings_of(options_of(each), together));
  }
  std::vector<Combination> some;
  std::unordered_set<uint64_t> met;
  while (true) {
    size_t best = 0, most = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      size_t count = 0;
      for (const uint64_t meeting : meetings[i]) {
        count += met.count(meeting) == 0 ? 1 : 0;
      }
      if (count > most) {
        best = i;
        most = count;
      }
    }
    if (most == 0) {
      return some;
    }
    met.insert(meetings[best].begin(), meetings[best].end());
    some.push_back(all[best]);
  }
}

} // namespace fsdp::testing
