#include "comm/process.h"

#include <array>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include "comm/host.h"

namespace fsdp {
namespace {

// The fields of /proc/<pid>/stat from the third on: the second, the program's name, may hold blanks and brackets.
std::string fields_after_name(int32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t bracket = line.rfind(')');
  return bracket == std::string::npos ? "" : line.substr(bracket + 1);
}

} // namespace

std::optional<uint64_t> process_start(int32_t pid) {
  constexpr int kFieldsBetween = 18; // the state is field 3, the start time field 22
  std::istringstream fields(fields_after_name(pid));
  char state = 'X';
  if (!(fields >> state) || state == 'X' || state == 'Z') {
    return std::nullopt;
  }
  std::string skipped;
  for (int i = 0; i < kFieldsBetween; ++i) {
    fields >> skipped;
  }
  uint64_t start = 0;
  fields >> start;
  return fields ? std::optional(start) : std::nullopt;
}

std::string process_space() {
  std::array<char, 64> name{};
  const auto length = readlink("/proc/self/ns/pid", name.data(), name.size());
  return host_identity() + " " + std::string(name.data(), length < 0 ? 0 : length);
}

} // namespace fsdp
