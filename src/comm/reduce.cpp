#include "comm/reduce.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/div.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include "base/check.h"

namespace fsdp {
namespace {

using rank_order::Combine;
using rank_order::Number;

/// What a dtype's elements consist of: a complex number is two.
struct Numbers {
  Number kind;
  int64_t each; ///< numbers per element
};

constexpr std::pair<c10::ScalarType, Numbers> kNumbersOf[] = {
    {at::kFloat, {Number::kFloat, 1}},
    {at::kDouble, {Number::kDouble, 1}},
    {at::kHalf, {Number::kHalf, 1}},
    {at::kBFloat16, {Number::kBFloat16, 1}},
    {at::kComplexFloat, {Number::kFloat, 2}},
    {at::kComplexDouble, {Number::kDouble, 2}},
    {at::kChar, {Number::kInt8, 1}},
    {at::kByte, {Number::kUInt8, 1}},
    {at::kShort, {Number::kInt16, 1}},
    {at::kInt, {Number::kInt32, 1}},
    {at::kLong, {Number::kInt64, 1}},
    {at::kBool, {Number::kBool, 1}},
};

/// Null for what cannot be combined.
const Numbers* find_numbers(c10::ScalarType dtype) {
  const auto* found =
      std::find_if(std::begin(kNumbersOf), std::end(kNumbersOf), [&](auto& known) { return known.first == dtype; });
  return found == std::end(kNumbersOf) ? nullptr : &found->second;
}

static_assert(
    static_cast<int>(ReduceOp::kSum) == static_cast<int>(Combine::kSum) &&
    static_cast<int>(ReduceOp::kMax) == static_cast<int>(Combine::kMax) &&
    static_cast<int>(ReduceOp::kMin) == static_cast<int>(Combine::kMin));

// LibTorch's threads are behind its iterators: at::parallel_for is a template, which would bring an OpenMP of ours.
// This one iterates over as many bytes as there are numbers, which nobody touches: their places are the numbers'.
void reduce_on_threads(const rank_order::Reduction& reduction) {
  const at::Tensor places = at::from_blob(reduction.result, {reduction.count}, at::kByte);
  auto iterator =
      at::TensorIteratorConfig().add_output(places).check_all_same_dtype(false).resize_outputs(false).build();
  iterator.for_each([&](char** data, const int64_t*, int64_t count, int64_t rows) { // the rows follow one another
    const auto begin = data[0] - static_cast<char*>(reduction.result);
    rank_order::reduce(reduction, begin, begin + rows * count);
  });
}

} // namespace

Division::Division(double divide_by, c10::ScalarType dtype, bool sum_may_overflow) : after(divide_by) {
  if (sum_may_overflow && dtype == at::kHalf && divide_by > 1) {
    before = std::exp2(std::floor(std::log2(divide_by) / 2));
    after = divide_by / before;
  }
}

void divide_(const at::Tensor& tensor, double by) {
  if (by == 1) {
    return;
  }
  if (c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
    tensor.copy_(tensor.to(at::kDouble).div_(by)); // the conversion rounds toward zero
  } else {
    tensor.div_(by);
  }
}

bool host_combines(c10::ScalarType dtype) {
  return find_numbers(dtype) != nullptr;
}

void check_combines(c10::ScalarType dtype, const Label& label) {
  FSDP_CHECK(
      host_combines(dtype),
      "[{}] expected floating-point, complex, integer or bool numbers to sum over ranks, got {}; convert first",
      label.operation,
      c10::toString(dtype));
}

bool host_backends_combine(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kInt || dtype == at::kLong;
}

void reduce(const at::Tensor& result, const std::vector<const void*>& sources, ReduceOp op, double divide_by) {
  const Numbers& numbers = *find_numbers(result.scalar_type());
  reduce({
      .number = numbers.kind,
      .combine = static_cast<Combine>(op),
      .divide_by = divide_by,
      .sources = sources.data(),
      .count_sources = static_cast<int>(sources.size()),
      .result = result.mutable_data_ptr(),
      .count = result.numel() * numbers.each,
  });
}

void reduce(const rank_order::Reduction& reduction) {
  if (reduction.count <= at::internal::GRAIN_SIZE || at::get_num_threads() == 1) {
    rank_order::reduce(reduction, 0, reduction.count);
  } else {
    reduce_on_threads(reduction);
  }
}

std::vector<const void*> rows_of(const void* first, int64_t row_bytes, int rows) {
  std::vector<const void*> addresses;
  for (int64_t row = 0; row < rows; ++row) {
    addresses.push_back(static_cast<const char*>(first) + row * row_bytes);
  }
  return addresses;
}

} // namespace fsdp
