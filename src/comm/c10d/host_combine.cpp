#include "comm/c10d/host_combine.h"

#include <c10/util/Exception.h>

#include "comm/rank_order.h"
#include "comm/reduce.h"

namespace fsdp::adapter {
namespace {

std::optional<rank_order::Number> number_of(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return rank_order::Number::kFloat;
    case at::kDouble:
      return rank_order::Number::kDouble;
    case at::kHalf:
      return rank_order::Number::kHalf;
    case at::kBFloat16:
      return rank_order::Number::kBFloat16;
    case at::kChar:
      return rank_order::Number::kInt8;
    case at::kByte:
      return rank_order::Number::kUInt8;
    case at::kShort:
      return rank_order::Number::kInt16;
    case at::kInt:
      return rank_order::Number::kInt32;
    case at::kLong:
      return rank_order::Number::kInt64;
    case at::kBool:
      return rank_order::Number::kBool;
    default:
      return std::nullopt;
  }
}

rank_order::Combine combine_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return rank_order::Combine::kSum;
    case ReduceOp::kMax:
      return rank_order::Combine::kMax;
    case ReduceOp::kMin:
      return rank_order::Combine::kMin;
  }
  TORCH_INTERNAL_ASSERT(false, "a ReduceOp that the host does not know");
}

} // namespace

bool combines_on_host(c10::ScalarType dtype) {
  return number_of(dtype).has_value();
}

bool host_backends_combine(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kInt || dtype == at::kLong;
}

void combine_on_host(const at::Tensor& result, const std::vector<const void*>& sources, ReduceOp op, double divide_by) {
  reduce({
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
