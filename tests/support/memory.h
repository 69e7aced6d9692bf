#pragma once

#include <fstream>
#include <string>

#include <gtest/gtest.h>

namespace fsdp::testing {

/// This process's share of memory in MiB: pages that several processes map are divided among them.
inline double proportional_mebibytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("Pss:", 0) == 0) {
      return std::stod(line.substr(4)) / 1024;
    }
  }
  ADD_FAILURE() << "no Pss in smaps_rollup";
  return 0;
}

} // namespace fsdp::testing
