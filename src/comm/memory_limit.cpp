#include "comm/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <string>

#include <unistd.h>

#include "base/phrase.h"

namespace fsdp {
namespace {

using std::filesystem::path;

size_t physical_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// The number in a file; a limit as high as can be if there is none ("max").
size_t number_in(const path& file) {
  size_t number = 0;
  return std::ifstream(file) >> number ? number : SIZE_MAX;
}

// A group's limit holds for all groups below it. Inside a container the group's own folder may be the mounted one, and
// its path lead nowhere.
size_t smallest_limit(const path& mounted, const path& group, const char* file) {
  size_t limit = number_in(mounted / file);
  path folder = mounted;
  for (const path& name : group.relative_path()) {
    folder /= name;
    limit = std::min(limit, number_in(folder / file));
  }
  return limit;
}

} // namespace

size_t memory_limit(const path& root) {
  const path mounted = root / "sys/fs/cgroup";
  size_t limit = physical_memory();
  std::ifstream groups(root / "proc/self/cgroup"); // "0::/path" (v2) or "4:memory:/path" (v1)
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    const std::string controllers = phrase(",{},", line.substr(first + 1, second - first - 1));
    const path group = line.substr(second + 1);
    if (controllers == ",,") {
      limit = std::min(limit, smallest_limit(mounted, group, "memory.max"));
    } else if (controllers.find(",memory,") != std::string::npos) {
      limit = std::min(limit, smallest_limit(mounted / "memory", group, "memory.limit_in_bytes"));
    }
  }
  return limit;
}

} // namespace fsdp
