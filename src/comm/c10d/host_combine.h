#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/group.h>

namespace fsdp::adapter {

/// Whether `combine_on_host` knows the dtype.
bool combines_on_host(c10::ScalarType dtype);

/// Whether all host backends of c10d combine the dtype; Gloo and MPI know little beyond.
bool host_backends_combine(c10::ScalarType dtype);

/// result = the ranks' numbers combined in rank order, half types in fp32, then divided. All on the host.
/// `sources` has one address per rank, of as many numbers as `result` has.
void combine_on_host(const at::Tensor& result, const std::vector<const void*>& sources, ReduceOp op, double divide_by);

} // namespace fsdp::adapter
