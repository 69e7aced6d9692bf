#pragma once

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace fsdp::testing {

/// A range of this process's addresses, and what is there.
struct Mapping {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  std::string permissions; ///< "rw-s": readable, writable, not executable, shared
  std::string name; ///< of the file; "/memfd:fsdp-home (deleted)" for one without a path
};

/// This process's mappings whose name contains `name`.
inline std::vector<Mapping> mappings(const std::string& name = "") {
  std::ifstream file("/proc/self/maps");
  std::vector<Mapping> found;
  for (std::string line; std::getline(file, line);) {
    Mapping mapping;
    char permissions[8] = "";
    int read = 0;
    std::sscanf(line.c_str(), "%lx-%lx %7s %*s %*s %*s %n", &mapping.begin, &mapping.end, permissions, &read);
    mapping.permissions = permissions;
    mapping.name = line.substr(static_cast<size_t>(read));
    if (mapping.name.find(name) != std::string::npos) {
      found.push_back(std::move(mapping));
    }
  }
  return found;
}

/// The one that the address lies in; without a name and empty if there is none.
inline Mapping mapping_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  for (auto& mapping : mappings()) {
    if (mapping.begin <= address && address < mapping.end) {
      return mapping;
    }
  }
  return {};
}

/// This process's share in MiB of all memory that no file backs. Programs and libraries are left out: the share of
/// these changes with what else runs on the machine.
inline double proportional_mebibytes_of_no_file() {
  std::ifstream file("/proc/self/smaps_rollup");
  double kibibytes = 0;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("Pss_Anon:", 0) == 0 || line.rfind("Pss_Shmem:", 0) == 0) {
      kibibytes += std::stod(line.substr(line.find(':') + 1));
    }
  }
  return kibibytes / 1024;
}

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
