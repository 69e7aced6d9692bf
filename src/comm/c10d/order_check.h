#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include <fsdp/group.h>

namespace fsdp::adapter {

/// What a rank is about to do, in a form of fixed size that ranks exchange to find out whether all do the same.
struct OrderRecord {
  int64_t sequence;
  std::string collective;
  Label label;
  int64_t bytes;

  at::Tensor to_tensor(c10::Device device) const;
};

/// Compares the records of all ranks with this rank's. Names both sides of the first difference; empty if there is
/// none.
std::string find_mismatch(const at::Tensor& records, int rank, int size);

} // namespace fsdp::adapter
