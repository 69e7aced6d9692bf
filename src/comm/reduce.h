#pragma once

#include <vector>

#include <fsdp/group.h>

#include "comm/rank_order.h"

/// Sums over ranks, on the host.
namespace fsdp {

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
