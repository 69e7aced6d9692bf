#pragma once

#include <string>

namespace fsdp::disk {

/// The names that a checkpoint's tensors have in its index.
constexpr const char* kModel = "model/";
constexpr const char* kOptimizer = "optimizer/"; ///< NAME/KEY
constexpr const char* kExtra = "extra/";
constexpr const char* kRandom = "random/"; ///< RANK/DEVICE

inline std::string optimizer_name(const std::string& param, const std::string& key) {
  return kOptimizer + param + "/" + key;
}
inline std::string random_name(int rank, const std::string& device) {
  return kRandom + std::to_string(rank) + "/" + device;
}

} // namespace fsdp::disk
