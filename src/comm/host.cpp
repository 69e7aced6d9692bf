#include "comm/host.h"

#include <algorithm>
#include <array>
#include <fstream>

#include <unistd.h>

namespace fsdp {

std::string host_identity() {
  std::array<char, 256> name{};
  gethostname(name.data(), name.size() - 1);
  // Hosts made from one image may share a name; no two share a boot.
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return std::string(name.data()) + " " + boot;
}

int rank_on_host(int rank, const std::vector<std::string>& identities) {
  return static_cast<int>(std::count(identities.begin(), identities.begin() + rank, identities[rank]));
}

} // namespace fsdp
