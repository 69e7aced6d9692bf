#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <fsdp/extent.h>

#include "checkpoint/export_plan.h"

namespace fsdp::disk {

/// Elements of a tensor that a rank writes.
struct ExportPart {
  size_t file = 0; ///< its number
  size_t tensor = 0; ///< likewise, in the file
  Extent extent{};
};

/// As the ranks exchange them.
std::string to_bytes(const std::vector<ExportPart>& parts);

/// An Error if elements of a tensor are written by none of the ranks, of each of which the parts are given as bytes, or
/// by several.
void check_complete(const std::vector<ExportFile>& files, const std::vector<std::string>& parts_of_ranks);

} // namespace fsdp::disk
