#include "comm/c10d/host_combine.h"

#include <c10/util/Exception.h>

#include "comm/shm/reduce.h"

namespace fsdp::adapter {
namespace {

std::optional<shm::Number> number_of(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return shm::Number::kFloat;
    case at::kDouble:
      return shm::Number::kDouble;
    case at::kHalf:
      return shm::Number::kHalf;
    case at::kBFloat16:
      return shm::Number::kBFloat16;
    case at::kChar:
      return shm::Number::kInt8;
    case at::kByte:
      return shm::Number::kUInt8;
    case at::kShort:
      return shm::Number::kInt16;
    case at::kInt:
      return shm::Number::kInt32;
    case at::kLong:
      return shm::Number::kInt64;
    case at::kBool:
      return shm::Number::kBool;
    default:
      return std::nullopt;
  }
}

shm::Combine combine_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return shm::Combine::kSum;
    case ReduceOp::kMax:
      return shm::Combine::kMax;
    case ReduceOp::kMin:
      return shm::Combine::kMin;
  }
  TORCH_INTERNAL_ASSERT(false, "a ReduceOp that the host does not know");
}

} // namespace

bool combines_on_host(c10::ScalarType dtype) {
  return number_of(dtype).has_value();
}

void combine_on_host(const at::Tensor& result, const std::vector<const void*>& sources, ReduceOp op, double divide_by) {
  shm::reduce({
      .number = number_of(result.scalar_type()).value(),
      .combine = combine_of(op),
      .divide_by = divide_by,
      .sources = sources.data(),
      .count_sources = static_cast<int>(sources.size()),
      .result = result.mutable_data_ptr(),
      .count = result.numel(),
  });
}

} // namespace fsdp::adapter
