#pragma once

#include <vector>

#include <fsdp/group.h>

#include "comm/rank_order.h"

/// Sums over ranks on the host, and what they are divided by, on any device.
namespace fsdp {

/// A division split in two around a sum. Only fp16 needs the first half: its sum over many ranks can exceed 65504, so
/// half of the factor (a power of two near its root, which costs no precision) is divided out before, as PyTorch does.
/// bf16 has the range of fp32. All other dtypes divide once, truly, after the sum.
struct Division {
  Division(double divide_by, c10::ScalarType dtype, bool sum_may_overflow);

  double before = 1;
  double after = 1;
};

/// Divides in place; nothing for 1. Integers round toward zero.
void divide_(const at::Tensor& tensor, double by);

/// Whether the numbers can be combined on the host.
bool host_combines(c10::ScalarType dtype);
/// An error if not.
void check_combines(c10::ScalarType dtype, const Label& label);

/// Whether all host backends of c10d combine the dtype; Gloo and MPI know little beyond.
bool host_backends_combine(c10::ScalarType dtype);

/// All numbers of a `rank_order::Reduction`, divided among the threads that LibTorch's operators use. Equal bits,
/// whatever their number.
void reduce(const rank_order::Reduction& reduction);
/// The same for a tensor; `sources` has one address per rank, of as many elements as `result` has.
void reduce(const at::Tensor& result, const std::vector<const void*>& sources, ReduceOp op, double divide_by);
/// The addresses of so many rows that lie one after another.
std::vector<const void*> rows_of(const void* first, int64_t row_bytes, int rows);

} // namespace fsdp
