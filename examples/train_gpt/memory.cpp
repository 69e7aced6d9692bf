#include "memory.h"

#include <fstream>
#include <limits>
#include <string>

namespace train_gpt {
namespace {

int64_t proportional_set_size() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  std::string name;
  int64_t kilobytes = 0;
  rollup.ignore(std::numeric_limits<std::streamsize>::max(), '\n'); // the address range
  while (rollup >> name >> kilobytes) {
    if (name == "Pss:") {
      return kilobytes * 1024;
    }
    rollup.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

} // namespace

int64_t MemoryGauge::read() {
  auto now = std::chrono::steady_clock::now();
  if (bytes_ == 0 || now - asked_ >= std::chrono::seconds(1)) {
    bytes_ = proportional_set_size();
    asked_ = now;
  }
  return bytes_;
}

} // namespace train_gpt
