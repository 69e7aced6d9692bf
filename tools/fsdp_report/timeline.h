#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace fsdp_report {

/// Something that one thread of a rank did. Times in microseconds since the first event of all ranks.
struct Span {
  std::string name;
  std::string unit;
  int thread = 0;
  int peer = -1; ///< the rank that was waited for, -1: none in particular
  double begin = 0;
  double duration = 0;

  bool waits() const {
    return name.starts_with("wait for rank") || name.starts_with("wait for collective");
  }
};

/// The bytes that a rank pays, from a moment on.
struct Memory {
  double time = 0;
  int64_t whole = 0, gradients = 0, bound = 0;
};

struct Rank {
  std::vector<Span> spans;
  std::vector<Memory> memory;
};

struct Timeline {
  std::map<int, Rank> ranks;

  double end() const;
};

/// How long all ranks together waited because of one unit.
struct UnitWaits {
  std::string unit;
  int64_t waits = 0;
  double waited = 0;
  double longest = 0;
  std::map<int, double> by_peer; ///< how long for each rank
};

/// One or several ranks' traces. A std::runtime_error that names the file if one is not a trace. The last line of a
/// process that was killed may be missing.
Timeline read_traces(const std::vector<std::string>& files);

/// The longest waited for come first.
std::vector<UnitWaits> waits_by_unit(const Timeline& timeline);

/// For the page.
nlohmann::json to_json(const Timeline& timeline);

} // namespace fsdp_report
