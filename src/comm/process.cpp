#include "comm/process.h"

#include <array>
#include <cerrno>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include "comm/host.h"

namespace fsdp {
namespace {

struct Status {
  bool known = true; ///< false: /proc says nothing
  std::optional<uint64_t> start; ///< unset: has ended
};

std::string path_of(int32_t pid) {
  return "/proc/" + std::to_string(pid) + "/stat";
}

// The fields of /proc/<pid>/stat from the third on: the second, the program's name, may hold blanks and brackets.
Status status_in(const std::string& line) {
  constexpr int kFieldsBetween = 18; // the state is field 3, the start time field 22
  const size_t bracket = line.rfind(')');
  std::istringstream fields(bracket == std::string::npos ? "" : line.substr(bracket + 1));
  char state = 'X';
  if (!(fields >> state) || state == 'X' || state == 'Z') {
    return {};
  }
  std::string skipped;
  for (int i = 0; i < kFieldsBetween; ++i) {
    fields >> skipped;
  }
  uint64_t start = 0;
  fields >> start;
  return {.known = static_cast<bool>(fields), .start = start};
}

Status status_of(int32_t pid) {
  errno = 0;
  std::ifstream file(path_of(pid));
  if (!file) {
    const bool is_gone = errno == ENOENT && access("/proc/self/stat", F_OK) == 0;
    return {.known = is_gone, .start = std::nullopt}; // else no file can be opened here
  }
  std::string line;
  std::getline(file, line);
  return status_in(line);
}

} // namespace

std::optional<uint64_t> process_start(int32_t pid) {
  return status_of(pid).start;
}

bool has_ended(int32_t pid, uint64_t started) {
  const Status status = status_of(pid);
  return status.known && status.start != std::optional(started);
}

std::string process_space() {
  std::array<char, 64> name{};
  const auto length = readlink("/proc/self/ns/pid", name.data(), name.size());
  return host_identity() + " " + std::string(name.data(), length < 0 ? 0 : length);
}

} // namespace fsdp
