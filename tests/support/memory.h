#pragma once

#include <fstream>
#include <string>

namespace fsdp::testing {

/// This process's share in MiB of the mappings whose name contains `name`: pages that several processes map are divided
/// among them. Of all mappings, with an empty name.
inline double proportional_mebibytes(const std::string& name = "") {
  std::ifstream file("/proc/self/smaps");
  std::string line;
  bool counts = false;
  double kibibytes = 0;
  while (std::getline(file, line)) {
    if (line.find('-') < line.find(' ')) { // the head of a mapping: its addresses
      counts = line.find(name) != std::string::npos;
    } else if (counts && line.rfind("Pss:", 0) == 0) {
      kibibytes += std::stod(line.substr(4));
    }
  }
  return kibibytes / 1024;
}

} // namespace fsdp::testing
