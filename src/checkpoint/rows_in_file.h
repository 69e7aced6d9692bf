#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/held.h>

namespace fsdp::disk {

/// What a rank has of a tensor, as it comes into a file where the whole lies row by row.
struct RowsInFile {
  struct Run {
    int64_t from; ///< among `elements`
    int64_t to; ///< in the whole
    int64_t length;
  };
  at::Tensor elements{}; ///< contiguous, on the CPU
  std::vector<Run> runs{};
};

RowsInFile rows_in_file(const HeldTensor& held);

} // namespace fsdp::disk
