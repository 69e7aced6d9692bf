#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/clip_grad_norm.h>
#include <fsdp/error.h>

namespace fsdp {
namespace {

using torch::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor with_grad(const Tensor& grad) {
  Tensor param = torch::zeros_like(grad).requires_grad_();
  param.mutable_grad() = grad.clone();
  return param;
}

Tensor noise(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, torch::make_generator<at::CPUGeneratorImpl>(seed));
}

std::vector<Tensor> some_parameters() {
  std::vector<Tensor> params{with_grad(noise({20, 30}, 1)), with_grad(noise({}, 2)), with_grad(noise({7}, 3))};
  params.push_back(torch::zeros({3}).requires_grad_());
  params.push_back(with_grad(torch::empty({0, 4})));
  return params;
}

TEST(ClipGradNorm, ScalesAsTorchDoes) {
  for (const double norm_type : {1.0, 2.0, 3.5, kInfinity}) {
    for (const double max_norm : {0.0, 0.7, 1e6}) {
      const auto ours = some_parameters();
      auto theirs = some_parameters();
      theirs.pop_back(); // LibTorch refuses the maximum of nothing
      const Tensor norm = clip_grad_norm_(ours, max_norm, {.norm_type = norm_type});
      const double expected = torch::nn::utils::clip_grad_norm_(theirs, max_norm, norm_type);
      EXPECT_EQ(norm.scalar_type(), torch::kFloat);
      EXPECT_EQ(norm.dim(), 0);
      EXPECT_NEAR(norm.item<double>(), expected, 1e-5 * expected) << norm_type;
      for (size_t i = 0; i < theirs.size(); ++i) {
        ASSERT_EQ(ours[i].grad().defined(), theirs[i].grad().defined());
        EXPECT_TRUE(!ours[i].grad().defined() || torch::allclose(ours[i].grad(), theirs[i].grad(), 1e-5, 0))
            << norm_type << " " << i;
      }
    }
  }
}

TEST(ClipGradNorm, SmallGradientsKeepTheirBits) {
  const auto params = some_parameters();
  clip_grad_norm_(params, 1e6);
  EXPECT_TRUE(torch::equal(params[0].grad(), some_parameters()[0].grad()));
}

TEST(ClipGradNorm, DtypesMayBeMixed) {
  const std::vector<Tensor> params{
      with_grad(torch::full({4}, 3.0, torch::kBFloat16)),
      with_grad(torch::full({4}, 3.0, torch::kFloat)),
      with_grad(torch::full({7}, 2.0, torch::kDouble))};
  const Tensor norm = clip_grad_norm_(params, 5.0);
  EXPECT_EQ(norm.scalar_type(), torch::kDouble);
  EXPECT_DOUBLE_EQ(norm.item<double>(), 10.0);
  EXPECT_EQ(params[0].grad()[0].item<double>(), 1.5);
  EXPECT_NEAR(params[1].grad()[0].item<double>(), 1.5, 1e-6);
  EXPECT_NEAR(params[2].grad()[0].item<double>(), 1.0, 1e-6);
}

TEST(ClipGradNorm, ComplexGradientsCountByTheirLengths) {
  for (const auto dtype : {torch::kFloat, torch::kDouble}) {
    for (const double norm_type : {1.0, 2.0, 3.5, kInfinity}) {
      const Tensor complex = torch::complex(noise({5, 3}, 1), noise({5, 3}, 2)).to(c10::toComplexType(dtype));
      const std::vector<Tensor> params{with_grad(complex), with_grad(noise({7}, 3))};
      const std::vector<Tensor> lengths{with_grad(complex.abs()), with_grad(noise({7}, 3))};
      const Tensor norm = clip_grad_norm_(params, 0.7, {.norm_type = norm_type});
      const double expected = clip_grad_norm_(lengths, 0.7, {.norm_type = norm_type}).item<double>();
      EXPECT_EQ(norm.scalar_type(), dtype);
      EXPECT_NEAR(norm.item<double>(), expected, 1e-5 * expected);
      EXPECT_TRUE(torch::allclose(params[0].grad(), complex * (0.7 / expected), 1e-4));
    }
  }
}

// In bfloat16 the sum of squares would stop at 256, and the norm itself would be rounded to 3 digits.
TEST(ClipGradNorm, HalfTypesAreSummedInMorePrecision) {
  const auto norm = clip_grad_norm_(std::vector<Tensor>{with_grad(torch::ones({1001}, torch::kBFloat16))}, 1e6);
  EXPECT_FLOAT_EQ(norm.item<float>(), std::sqrt(1001.0f));
}

// Added in float32, the norm of slices would differ from the norm of the whole in its seventh digit.
TEST(ClipGradNorm, DoesNotDependOnHowGradientsAreCut) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    for (const double norm_type : {1.0, 2.0, kInfinity}) {
      for (uint64_t seed = 0; seed < 20; ++seed) {
        const Tensor whole = noise({1000, 101}, seed).to(dtype);
        const std::vector<Tensor> cut{with_grad(whole.slice(0, 0, 333)), with_grad(whole.slice(0, 333))};
        const Tensor expected = clip_grad_norm_(std::vector<Tensor>{with_grad(whole)}, 1e9, {.norm_type = norm_type});
        EXPECT_TRUE(torch::equal(clip_grad_norm_(cut, 1e9, {.norm_type = norm_type}), expected)) << norm_type;
      }
    }
  }
}

TEST(ClipGradNorm, GradientsOfAnyLayoutCount) {
  const Tensor grad = noise({40, 50}, 1);
  Tensor param = torch::zeros({40, 25}).requires_grad_();
  param.mutable_grad() = grad.slice(1, 0, 50, 2);
  const double expected = param.grad().to(torch::kDouble).norm().item<double>();
  EXPECT_FLOAT_EQ(clip_grad_norm_(std::vector<Tensor>{param}, 1e9).item<float>(), expected);
  Tensor transposed = torch::zeros({50, 40}).requires_grad_();
  transposed.mutable_grad() = grad.t();
  EXPECT_FLOAT_EQ(
      clip_grad_norm_(std::vector<Tensor>{transposed}, 1e9).item<float>(),
      grad.to(torch::kDouble).norm().item<double>());
}

TEST(ClipGradNorm, WithoutGradientsTheNormIsZero) {
  for (const double norm_type : {2.0, kInfinity}) {
    const std::vector<Tensor> params{torch::zeros({3}).requires_grad_()};
    EXPECT_EQ(clip_grad_norm_(params, 1.0, {.norm_type = norm_type}).item<float>(), 0);
    EXPECT_FALSE(params[0].grad().defined());
    EXPECT_EQ(clip_grad_norm_(std::vector<Tensor>{}, 1.0, {.norm_type = norm_type}).item<float>(), 0);
  }
}

TEST(ClipGradNorm, AWeightListedTwiceCountsOnce) {
  const Tensor shared = with_grad(torch::full({4}, 2.0));
  EXPECT_EQ(clip_grad_norm_({shared, shared}, 2.0).item<float>(), 4);
  EXPECT_NEAR(shared.grad()[0].item<float>(), 1, 1e-6);
}

TEST(ClipGradNorm, TakesAModule) {
  torch::nn::Linear linear(2, 2);
  linear->weight.mutable_grad() = torch::full({2, 2}, 2.0);
  EXPECT_EQ(clip_grad_norm_(*linear, 2.0).item<float>(), 4);
  EXPECT_NEAR(linear->weight.grad()[0][0].item<float>(), 1, 1e-6);
  EXPECT_NEAR(clip_grad_norm_(linear, 1.0).item<float>(), 2, 1e-6);
  torch::nn::LinearImpl on_the_stack(2, 2);
  on_the_stack.weight.mutable_grad() = torch::full({2, 2}, 2.0);
  EXPECT_EQ(clip_grad_norm_(on_the_stack, 2.0).item<float>(), 4);
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(ClipGradNorm, AnEmptyHolderIsAnError) {
  EXPECT_EQ(
      error_of([] { clip_grad_norm_(torch::nn::Linear(nullptr), 1.0); }).find("[clip_grad_norm_] expected a module"),
      0u);
}

TEST(ClipGradNorm, NonfiniteNormsAreErrorsOnRequest) {
  for (const double norm_type : {1.0, 2.0, kInfinity}) {
    for (const double bad : {kInfinity, std::nan("")}) {
      Tensor grad = torch::ones({4});
      grad[1] = bad;
      const std::vector<Tensor> params{with_grad(grad), with_grad(torch::ones({2}))};
      const auto clip = [&] { clip_grad_norm_(params, 1.0, {.norm_type = norm_type, .error_if_nonfinite = true}); };
      EXPECT_NE(error_of(clip).find("expected finite gradients"), std::string::npos);
      EXPECT_TRUE(torch::equal(params[1].grad(), torch::ones({2})));
      const double norm = clip_grad_norm_(params, 1.0, {.norm_type = norm_type}).item<double>();
      EXPECT_EQ(std::isnan(norm), std::isnan(bad));
      EXPECT_FALSE(std::isfinite(norm));
    }
  }
}

TEST(ClipGradNorm, MeaninglessNormTypesAreErrors) {
  for (const double norm_type : {0.0, -1.0, -kInfinity, std::nan("")}) {
    const auto clip = [&] { clip_grad_norm_(some_parameters(), 1.0, {.norm_type = norm_type}); };
    EXPECT_NE(error_of(clip).find("norm_type above 0"), std::string::npos) << norm_type;
  }
}

TEST(ClipGradNorm, SparseGradientsAreErrors) {
  Tensor weight = torch::ones({4, 2}).requires_grad_();
  torch::embedding(weight, torch::tensor({1}), -1, false, /*sparse=*/true).sum().backward();
  const auto clip = [&] { clip_grad_norm_(std::vector<Tensor>{weight}, 1.0); };
  EXPECT_NE(error_of(clip).find("dense gradients"), std::string::npos);
}

} // namespace
} // namespace fsdp
