#include "comm/rank_order.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "comm/group_checks.h"
#include "comm/reduce.h"

namespace fsdp::rank_order {
namespace {

using fsdp::testing::numbers;
using fsdp::testing::rank_ordered;
using fsdp::testing::same_bits;

at::Tensor reduced(
    void (*kernel)(const Reduction&),
    Number number,
    const std::vector<at::Tensor>& of_ranks,
    Combine combine = Combine::kSum,
    double divide_by = 1) {
  at::Tensor result = at::empty_like(of_ranks[0]);
  std::vector<const void*> sources;
  for (const at::Tensor& tensor : of_ranks) {
    sources.push_back(tensor.const_data_ptr());
  }
  kernel(
      {.number = number,
       .combine = combine,
       .divide_by = divide_by,
       .sources = sources.data(),
       .count_sources = static_cast<int>(sources.size()),
       .result = result.mutable_data_ptr(),
       .count = result.numel()});
  return result;
}

struct Case {
  Number number;
  c10::ScalarType dtype;
};
const Case kCases[] = {
    {Number::kFloat, at::kFloat},
    {Number::kDouble, at::kDouble},
    {Number::kHalf, at::kHalf},
    {Number::kBFloat16, at::kBFloat16},
    {Number::kInt8, at::kChar},
    {Number::kUInt8, at::kByte},
    {Number::kInt16, at::kShort},
    {Number::kInt32, at::kInt},
    {Number::kInt64, at::kLong},
    {Number::kBool, at::kBool}};

class Reduce : public ::testing::TestWithParam<void (*)(const Reduction&)> {};

TEST_P(Reduce, EveryDtypeIsSummedInRankOrder) {
  for (const auto& [number, dtype] : kCases) {
    for (const int ranks : {1, 2, 3, 8}) {
      for (const int64_t count : {0, 1, 7, 2048, 2049, 100'001}) {
        std::vector<at::Tensor> of_ranks;
        for (int r = 0; r < ranks; ++r) {
          of_ranks.push_back(numbers(count, dtype, r));
        }
        EXPECT_TRUE(same_bits(reduced(GetParam(), number, of_ranks), rank_ordered(of_ranks, 1)))
            << c10::toString(dtype) << " " << ranks << " " << count;
        if (dtype != at::kBool) {
          EXPECT_TRUE(same_bits(reduced(GetParam(), number, of_ranks, Combine::kSum, 3), rank_ordered(of_ranks, 3)))
              << c10::toString(dtype) << " " << ranks << " " << count;
        }
      }
    }
  }
}

// All 65536 of them: a sum of one is a conversion to float and back.
TEST_P(Reduce, HalfTypesKeepTheirValue) {
  const at::Tensor bits = at::arange(65536, at::kInt).to(at::kShort);
  for (const auto& [number, dtype] : {Case{Number::kHalf, at::kHalf}, Case{Number::kBFloat16, at::kBFloat16}}) {
    const at::Tensor all = bits.view(dtype);
    const at::Tensor result = reduced(GetParam(), number, {all});
    EXPECT_TRUE(at::equal(result.isnan(), all.isnan()));
    EXPECT_TRUE(same_bits(at::where(all.isnan(), 0, result), at::where(all.isnan(), 0, all)));
  }
}

// Sums that fall between two numbers, are subnormal, or too big.
TEST_P(Reduce, HalfTypesRoundAsTorchDoes) {
  at::manual_seed(1);
  for (const auto& [number, dtype] : {Case{Number::kHalf, at::kHalf}, Case{Number::kBFloat16, at::kBFloat16}}) {
    const auto random_bits = [] { return at::randint(-32768, 32768, {1 << 20}, at::kShort); };
    const at::Tensor a = random_bits().view(dtype);
    const at::Tensor b = random_bits().view(dtype);
    const at::Tensor expected = a.to(at::kFloat).add(b.to(at::kFloat)).to(dtype);
    const at::Tensor result = reduced(GetParam(), number, {a, b});
    EXPECT_TRUE(at::equal(result.isnan(), expected.isnan()));
    EXPECT_TRUE(same_bits(at::where(expected.isnan(), 0, result), at::where(expected.isnan(), 0, expected)));
  }
}

TEST_P(Reduce, MaxAndMinPassNaNsOn) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor a = at::tensor({1.f, nan, 3.f, -1.f});
  const at::Tensor b = at::tensor({2.f, 0.f, nan, -2.f});
  EXPECT_TRUE(at::allclose(
      reduced(GetParam(), Number::kFloat, {a, b}, Combine::kMax), at::maximum(a, b), 0, 0, /*equal_nan=*/true));
  EXPECT_TRUE(at::allclose(
      reduced(GetParam(), Number::kFloat, {a, b}, Combine::kMin), at::minimum(a, b), 0, 0, /*equal_nan=*/true));
}

TEST_P(Reduce, TheResultMayBeASource) {
  at::Tensor a = numbers(5000, at::kFloat, 1);
  const at::Tensor b = numbers(5000, at::kFloat, 2);
  const at::Tensor expected = rank_ordered({b, a}, 2);
  const void* sources[] = {b.const_data_ptr(), a.const_data_ptr()};
  GetParam()(
      {.number = Number::kFloat,
       .divide_by = 2,
       .sources = sources,
       .count_sources = 2,
       .result = a.mutable_data_ptr(),
       .count = 5000});
  EXPECT_TRUE(same_bits(a, expected));
}

void best(const Reduction& reduction) {
  reduce(reduction, 0, reduction.count);
}

void baseline(const Reduction& reduction) {
  reduce_baseline(reduction, 0, reduction.count);
}

void on_threads(const Reduction& reduction) {
  const int threads = at::get_num_threads();
#ifndef __SANITIZE_THREAD__ // which knows nothing of OpenMP's barriers
  at::set_num_threads(3);
#endif
  fsdp::reduce(reduction);
  at::set_num_threads(threads);
}

std::string kernel_name(const ::testing::TestParamInfo<void (*)(const Reduction&)>& info) {
  return info.param == &best ? "Best" : info.param == &baseline ? "Baseline" : "OnThreads";
}
INSTANTIATE_TEST_SUITE_P(Kernels, Reduce, ::testing::Values(&best, &baseline, &on_threads), kernel_name);

} // namespace
} // namespace fsdp::rank_order
