#include "comm/reduce.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

#include "base/check.h"

namespace fsdp {
namespace {

using rank_order::Combine;
using rank_order::Number;

c10::ScalarType of_size(size_t bytes) {
  switch (bytes) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

// LibTorch's threads are behind its iterators: at::parallel_for is a template, which would bring an OpenMP of ours.
void reduce_on_threads(const rank_order::Reduction& reduction) {
  const size_t size = rank_order::bytes_of(reduction.number);
  const at::Tensor result = at::from_blob(reduction.result, {reduction.count}, of_size(size));
  auto iterator =
      at::TensorIteratorConfig().add_output(result).check_all_same_dtype(false).resize_outputs(false).build();
  iterator.for_each([&](char** data, const int64_t*, int64_t count, int64_t rows) { // the rows follow one another
    const auto begin = (data[0] - static_cast<char*>(reduction.result)) / static_cast<int64_t>(size);
    rank_order::reduce(reduction, begin, begin + rows * count);
  });
}

} // namespace

std::optional<Numbers> find_numbers(c10::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Numbers{Number::kFloat, 1};
    case at::kDouble:
      return Numbers{Number::kDouble, 1};
    case at::kHalf:
      return Numbers{Number::kHalf, 1};
    case at::kBFloat16:
      return Numbers{Number::kBFloat16, 1};
    case at::kComplexFloat:
      return Numbers{Number::kFloat, 2};
    case at::kComplexDouble:
      return Numbers{Number::kDouble, 2};
    case at::kChar:
      return Numbers{Number::kInt8, 1};
    case at::kByte:
      return Numbers{Number::kUInt8, 1};
    case at::kShort:
      return Numbers{Number::kInt16, 1};
    case at::kInt:
      return Numbers{Number::kInt32, 1};
    case at::kLong:
      return Numbers{Number::kInt64, 1};
    case at::kBool:
      return Numbers{Number::kBool, 1};
    default:
      return std::nullopt;
  }
}

Numbers numbers_of(c10::ScalarType dtype, const Label& label) {
  const auto numbers = find_numbers(dtype);
  FSDP_CHECK(
      numbers,
      "[",
      label.operation,
      "] expected floating-point, complex, integer or bool numbers to sum over ranks, got ",
      c10::toString(dtype),
      "; convert first");
  return *numbers;
}

Combine combine_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return Combine::kSum;
    case ReduceOp::kMax:
      return Combine::kMax;
    case ReduceOp::kMin:
      return Combine::kMin;
  }
  TORCH_INTERNAL_ASSERT(false, "a ReduceOp that the host does not know");
}

bool host_backends_combine(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kInt || dtype == at::kLong;
}

void reduce(const rank_order::Reduction& reduction) {
  if (reduction.count <= at::internal::GRAIN_SIZE || at::get_num_threads() == 1) {
    rank_order::reduce(reduction, 0, reduction.count);
  } else {
    reduce_on_threads(reduction);
  }
}

void reduce(const at::Tensor& result, const std::vector<const void*>& sources, ReduceOp op, double divide_by) {
  const Numbers numbers = find_numbers(result.scalar_type()).value();
  reduce({
      .number = numbers.kind,
      .combine = combine_of(op),
      .divide_by = divide_by,
      .sources = sources.data(),
      .count_sources = static_cast<int>(sources.size()),
      .result = result.mutable_data_ptr(),
      .count = result.numel() * numbers.each,
  });
}

std::vector<const void*> rows_of(const void* first, int64_t row_bytes, int rows) {
  std::vector<const void*> addresses;
  addresses.reserve(static_cast<size_t>(rows));
  for (int64_t row = 0; row < rows; ++row) {
    addresses.push_back(static_cast<const char*>(first) + row * row_bytes);
  }
  return addresses;
}

} // namespace fsdp
