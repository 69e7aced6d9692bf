#pragma once

#include <filesystem>

namespace fsdp::testing {

/// std::filesystem::remove_all crashes beside LibTorch 2.11, which brings a part of another standard library along.
inline void remove_folder(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_directory() && !entry.is_symlink()) {
      remove_folder(entry);
    } else {
      std::filesystem::remove(entry);
    }
  }
  std::filesystem::remove(folder);
}

} // namespace fsdp::testing
