#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <fsdp/safetensors.h>

#include "checkpoint/safetensors_header.h"

namespace fsdp::disk {

/// One file of an export: the same on all ranks.
struct ExportFile {
  std::string name{};
  SafetensorsHeader header{}; ///< laid out
  std::string text{}; ///< of the header, with its length before it
  std::vector<HeldTensor> held{}; ///< by tensor of the header, as it lies in the file; of this rank
  std::vector<bool> transposed{}; ///< likewise
};

/// Spreads a model's tensors over files, tied ones once.
std::vector<ExportFile> plan_export(const ShardedStateDict& state, const ExportSafetensorsOptions& options);

/// Whether files of exports have such names: the one, or one of several.
bool is_file_of_export(std::string_view name);

/// The index that says what is in which of several files.
std::string weight_map(const std::vector<ExportFile>& files);

} // namespace fsdp::disk
