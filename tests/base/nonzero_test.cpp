#include "base/nonzero.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace fsdp {
namespace {

TEST(NonzeroElement, IsFoundWhereverItIs) {
  for (const auto dtype : {c10::kFloat, c10::kDouble, c10::kHalf, c10::kBFloat16, c10::kComplexFloat}) {
    for (const int64_t place : {0, 1, 255, 256, 1023, 2999}) {
      at::Tensor tensor = at::zeros({3000}, dtype);
      tensor[place] = 1;
      EXPECT_EQ(nonzero_element(tensor), place) << dtype;
    }
  }
}

TEST(NonzeroElement, IsALargeOneOfTheFirst) {
  for (const auto dtype : {c10::kFloat, c10::kDouble, c10::kHalf, c10::kBFloat16}) {
    at::Tensor tensor = at::ones({20, 30}, dtype);
    tensor[2][1] = -3;
    tensor[2][2] = 2;
    tensor[19][29] = 9;
    EXPECT_EQ(nonzero_element(tensor), 61) << dtype;
  }
}

TEST(NonzeroElement, ZeroHasNoSign) {
  at::Tensor tensor = at::zeros({3, 4}).neg();
  EXPECT_TRUE(tensor.signbit().all().item<bool>());
  EXPECT_EQ(nonzero_element(tensor), std::nullopt);
  tensor[2][1] = -1e-40; // denormal
  EXPECT_EQ(nonzero_element(tensor), 9);
}

TEST(NonzeroElement, OfNothing) {
  EXPECT_EQ(nonzero_element(at::zeros({0})), std::nullopt);
}

} // namespace
} // namespace fsdp
