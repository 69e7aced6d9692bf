#include "comm/process.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp {
namespace {

struct Status {
  bool known = true; ///< false: /proc says nothing
  std::optional<uint64_t> start; ///< unset: has ended
  int32_t parent = 0; ///< 0: none that can be seen
  std::string program; ///< the name's first 15 characters
};

std::string path_of(int32_t pid, const char* file) {
  return "/proc/" + std::to_string(pid) + "/" + file;
}

// The fields of /proc/<pid>/stat from the third on: the second, the program's name, may hold blanks and brackets.
Status status_in(const std::string& line) {
  constexpr int kFieldsBetween = 17; // the parent is field 4, the start time field 22
  const size_t opens = line.find('('), bracket = line.rfind(')');
  std::istringstream fields(bracket == std::string::npos ? "" : line.substr(bracket + 1));
  char state = 'X';
  if (!(fields >> state) || state == 'X' || state == 'Z') {
    return {};
  }
  int32_t parent = 0;
  fields >> parent;
  std::string skipped;
  for (int i = 0; i < kFieldsBetween; ++i) {
    fields >> skipped;
  }
  uint64_t start = 0;
  fields >> start;
  const bool known = static_cast<bool>(fields);
  return {.known = known, .start = start, .parent = parent, .program = line.substr(opens + 1, bracket - opens - 1)};
}

Status status_of(int32_t pid) {
  errno = 0;
  std::ifstream file(path_of(pid, "stat"));
  if (!file) {
    const bool is_gone = errno == ENOENT && access("/proc/self/stat", F_OK) == 0;
    return {.known = is_gone, .start = std::nullopt, .parent = 0, .program = ""}; // else no file can be opened here
  }
  std::string line;
  std::getline(file, line);
  return status_in(line);
}

/// Of MPI. One that a rank of another has started was given that rank's variables itself.
bool is_launcher(const std::string& program) {
  static const std::set<std::string> names{
      "hydra_pmi_proxy", "pmi_proxy", "mpispawn", "mpiexec", "mpiexec.hydra", "mpirun"};
  return names.count(program) > 0;
}

/// Nothing where they cannot be read.
std::set<std::string> environment_of(int32_t pid) {
  std::ifstream file(path_of(pid, "environ"));
  std::set<std::string> assignments;
  for (std::string one; std::getline(file, one, '\0');) {
    assignments.insert(one);
  }
  return assignments;
}

/// Those that this process may run on. All of the host's where these are more than a set of the usual size holds, which
/// the system then refuses to fill.
int usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores)
                                                          : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

} // namespace

std::optional<uint64_t> process_start(int32_t pid) {
  return status_of(pid).start;
}

bool has_ended(int32_t pid, uint64_t started) {
  const Status status = status_of(pid);
  return status.known && status.start != std::optional(started);
}

std::optional<int32_t> giver_of(const std::vector<std::string>& assignments) {
  for (int32_t process = getppid(); process > 0;) {
    const auto given = environment_of(process);
    if (given.empty()) {
      return std::nullopt;
    }
    const auto has = [&](const auto& one) { return given.count(one) > 0; };
    const Status status = status_of(process);
    if (is_launcher(status.program) || !std::all_of(assignments.begin(), assignments.end(), has)) {
      return process;
    }
    process = status.parent;
  }
  return std::nullopt;
}

std::shared_ptr<const WatchedProcess> WatchedProcess::of(int32_t pid, uint64_t started) {
  using Known = std::map<std::pair<int32_t, uint64_t>, std::weak_ptr<const WatchedProcess>>;
  // Never destroyed, as groups in static variables still wait for others at exit.
  static auto* const mutex = new std::mutex;
  static auto* const known = new Known;
  const std::scoped_lock lock(*mutex);
  auto& process = (*known)[{pid, started}];
  auto watched = process.lock();
  if (!watched) {
    process = watched = std::make_shared<const WatchedProcess>(pid, started);
  }
  return watched;
}

WatchedProcess::WatchedProcess(int32_t pid, uint64_t started)
    : pid_(pid), started_(started), descriptor_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))) {
  if (descriptor_ >= 0 && has_ended(pid, started)) { // the number may be another's by now
    close(std::exchange(descriptor_, -1));
  }
}

WatchedProcess::~WatchedProcess() {
  if (descriptor_ >= 0) {
    close(descriptor_);
  }
}

bool WatchedProcess::ended() const {
  if (descriptor_ < 0) {
    return has_ended(pid_, started_);
  }
  pollfd ended{.fd = descriptor_, .events = POLLIN, .revents = 0};
  if (poll(&ended, 1, /*timeout=*/0) <= 0) {
    return false;
  }
  const Status status = status_of(pid_); // the program may have closed the descriptor, which then is another's
  return status.known ? status.start != std::optional(started_) : (ended.revents & POLLIN) != 0;
}

std::string host_identity() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  // Hosts made from one image may share a name; no two share a boot.
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return std::string(name.data()) + " " + boot;
}

std::string process_space() {
  std::array<char, 64> name{};
  const auto length = readlink("/proc/self/ns/pid", name.data(), name.size());
  return host_identity() + " " + std::string(name.data(), length < 0 ? 0 : length);
}

// To look pays while every rank has a core of its own: otherwise it keeps the awaited rank from running.
int looks_before_sleep(int ranks_on_host) {
  return ranks_on_host <= usable_cores() ? 4000 : 50;
}

} // namespace fsdp
