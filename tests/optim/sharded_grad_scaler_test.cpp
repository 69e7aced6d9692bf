// Scaled gradients: the numbers of unscaled training, and steps that all ranks skip together.

#include <cmath>
#include <filesystem>
#include <limits>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Two weights whose gradients are the inputs.
struct Scaled {
  explicit Scaled(double lr = 1) : optimizer({weight}, torch::optim::SGDOptions(lr)) {}
  void backward(ShardedGradScaler& scaler, float first, float second) {
    scaler.scale((weight * torch::tensor({first, second})).sum()).backward();
  }
  torch::Tensor weight = torch::zeros({2}, torch::requires_grad());
  torch::optim::SGD optimizer;
};

TEST(ShardedGradScaler, StepsAreThoseWithoutScale) {
  ShardedGradScaler scaler({.group = group_of_one()});
  Scaled scaled;
  scaled.backward(scaler, 0.5, -2);
  EXPECT_TRUE(scaled.weight.grad().equal(torch::tensor({0.5f, -2.f}) * 65536));
  scaler.step(scaled.optimizer);
  scaler.update();
  EXPECT_TRUE(scaled.weight.equal(torch::tensor({-0.5f, 2.f})));
  EXPECT_TRUE(scaled.weight.grad().equal(torch::tensor({0.5f, -2.f})));
}

// Or its inverse would be 0, and so would be all gradients.
TEST(ShardedGradScaler, TheScaleDoesNotGrowBeyondFloat32) {
  const double begin = std::ldexp(1, 126);
  ShardedGradScaler scaler({.init_scale = begin, .growth_interval = 1, .group = group_of_one()});
  for (const double wanted : {2 * begin, 2 * begin}) {
    Scaled scaled;
    scaled.backward(scaler, 0.5, 0.25);
    scaler.step(scaled.optimizer);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), wanted);
    EXPECT_TRUE(scaled.weight.equal(torch::tensor({-0.5f, -0.25f})));
  }
}

TEST(ShardedGradScaler, TheScaleGrowsAfterEnoughStepsAndShrinksAfterAnOverflow) {
  ShardedGradScaler scaler({.init_scale = 8, .growth_factor = 4, .growth_interval = 2, .group = group_of_one()});
  const auto step = [&](float gradient) {
    Scaled scaled;
    scaled.backward(scaler, gradient, 1);
    scaler.step(scaled.optimizer);
    scaler.update();
    return scaled.weight.detach();
  };
  step(1);
  EXPECT_EQ(scaler.get_scale(), 8);
  step(1);
  EXPECT_EQ(scaler.get_scale(), 32);
  step(1);
  EXPECT_TRUE(step(kInfinity).equal(torch::zeros({2}))) << "the step was skipped";
  EXPECT_EQ(scaler.get_scale(), 16);
  step(1); // the steps in a row count anew
  EXPECT_EQ(scaler.get_scale(), 16);
  EXPECT_TRUE(step(std::nanf("")).equal(torch::zeros({2})));
  EXPECT_EQ(scaler.get_scale(), 8);
  scaler.update(100.0);
  EXPECT_EQ(scaler.get_scale(), 100);
}

TEST(ShardedGradScaler, GradientsMayBeClippedInBetween) {
  ShardedGradScaler scaler({.group = group_of_one()});
  Scaled scaled;
  scaled.backward(scaler, 3, 4);
  scaler.unscale_(scaled.optimizer);
  EXPECT_EQ(clip_grad_norm_({scaled.weight}, 1).item<float>(), 5);
  scaler.step(scaled.optimizer); // does not unscale again
  EXPECT_TRUE(torch::allclose(scaled.weight, torch::tensor({-0.6f, -0.8f}), 1e-5, 0));
}

TEST(ShardedGradScaler, OneOptimizersOverflowDoesNotSkipAnothersStep) {
  ShardedGradScaler scaler({.init_scale = 4, .group = group_of_one()});
  Scaled good, bad;
  good.backward(scaler, 1, 1);
  bad.backward(scaler, kInfinity, 1);
  scaler.step(good.optimizer);
  scaler.step(bad.optimizer);
  scaler.update();
  EXPECT_TRUE(good.weight.equal(torch::tensor({-1.f, -1.f})));
  EXPECT_TRUE(bad.weight.equal(torch::zeros({2})));
  EXPECT_EQ(scaler.get_scale(), 2);
}

TEST(ShardedGradScaler, KeepsTheDtypeOfLosses) {
  const ShardedGradScaler scaler({.init_scale = 2, .group = group_of_one()});
  for (const auto dtype : {torch::kHalf, torch::kBFloat16, torch::kFloat, torch::kDouble}) {
    const auto scaled = scaler.scale(torch::ones({}, dtype));
    EXPECT_EQ(scaled.scalar_type(), dtype);
    EXPECT_EQ(scaled.item<double>(), 2);
  }
}

TEST(ShardedGradScaler, GradientsMayBeSparseOrOfSeveralDtypes) {
  ShardedGradScaler scaler({.init_scale = 16, .group = group_of_one()});
  torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 2).sparse(true));
  auto half = torch::zeros({2}, torch::dtype(torch::kHalf).requires_grad(true));
  torch::optim::SGD optimizer({embedding->weight, half}, torch::optim::SGDOptions(1));
  const auto before = embedding->weight.detach().clone();
  scaler.scale(embedding->forward(torch::tensor({1, 1})).sum() + half.sum()).backward();
  scaler.unscale_(optimizer);
  EXPECT_TRUE(embedding->weight.grad().to_dense()[1].equal(torch::full({2}, 2.0)));
  EXPECT_TRUE(half.grad().equal(torch::ones({2}, torch::kHalf)));
}

TEST(ShardedGradScaler, RefusesCallsInAnotherOrder) {
  ShardedGradScaler scaler({.group = group_of_one()});
  Scaled scaled;
  EXPECT_TRUE(contains(error_message([&] { scaler.update(); }), "No inf checks were recorded prior to update"));
  scaled.backward(scaler, 1, 1);
  scaler.unscale_(scaled.optimizer);
  EXPECT_TRUE(contains(
      error_message([&] { scaler.unscale_(scaled.optimizer); }),
      "unscale_() has already been called on this optimizer"));
  scaler.step(scaled.optimizer);
  EXPECT_TRUE(contains(error_message([&] { scaler.step(scaled.optimizer); }), "step() has already been called"));
  EXPECT_TRUE(contains(error_message([&] { scaler.unscale_(scaled.optimizer); }), "being called after step()"));
  EXPECT_TRUE(contains(
      error_message([] { ShardedGradScaler({.growth_factor = 1}); }), "The growth factor must be > 1.0, and is 1"));
  EXPECT_TRUE(contains(
      error_message([] { ShardedGradScaler({.backoff_factor = 1}); }), "The backoff factor must be < 1.0, and is 1"));
}

TEST(ShardedGradScaler, DoesNothingWhereItIsDisabled) {
  ShardedGradScaler scaler({.enabled = false});
  Scaled scaled;
  scaled.backward(scaler, kInfinity, 1);
  scaler.unscale_(scaled.optimizer);
  scaler.step(scaled.optimizer);
  scaler.update();
  EXPECT_EQ(scaled.weight[0].item<float>(), -kInfinity);
  EXPECT_EQ(scaler.get_scale(), 1);
}

TEST(ShardedGradScaler, IsSavedWithItsSteps) {
  const std::string path = std::filesystem::temp_directory_path() / ("fsdp-scaler-" + std::to_string(::getpid()));
  ShardedGradScaler saved({.init_scale = 8, .growth_interval = 2, .group = group_of_one()});
  Scaled scaled;
  scaled.backward(saved, 1, 1);
  saved.step(scaled.optimizer);
  saved.update();
  torch::save(saved, path);
  ShardedGradScaler loaded({.growth_factor = 3, .group = group_of_one()});
  torch::load(loaded, path);
  EXPECT_EQ(loaded.get_scale(), 8);
  EXPECT_EQ(loaded.get_growth_factor(), 2);
  scaled.backward(loaded, 1, 1);
  loaded.step(scaled.optimizer);
  loaded.update();
  EXPECT_EQ(loaded.get_scale(), 16) << "the second step in a row";
  torch::save(ShardedGradScaler({.enabled = false}), path);
  EXPECT_TRUE(contains(error_message([&] { torch::load(loaded, path); }), "was saved from a disabled scaler"));
  std::filesystem::remove(path);
}

class ShardedScaling : public ::testing::TestWithParam<int> {};

// The gradient overflows on one rank alone, in the shard that it holds.
TEST_P(ShardedScaling, AllRanksSkipAStepThatOverflowedOnOne) {
  on_threads(GetParam(), [] {
    torch::nn::Linear model(torch::nn::LinearOptions(4, 8).bias(false));
    fully_shard(model);
    const auto shard = model->parameters()[0];
    torch::optim::SGD optimizer({shard}, torch::optim::SGDOptions(1));
    ShardedGradScaler scaler({.init_scale = 4});
    const auto before = shard.detach().clone();
    scaler.scale(model->weight.sum()).backward();
    if (rank() == world_size() - 1) {
      torch::NoGradGuard no_grad;
      shard.mutable_grad().flatten()[0].fill_(kInfinity);
    }
    scaler.step(optimizer);
    scaler.update();
    EXPECT_TRUE(shard.equal(before));
    EXPECT_EQ(scaler.get_scale(), 2);

    optimizer.zero_grad();
    scaler.scale(model->weight.sum()).backward();
    scaler.step(optimizer);
    scaler.update();
    EXPECT_TRUE(shard.equal(before - 1));
    EXPECT_EQ(scaler.get_scale(), 2);
  });
}

TEST_P(ShardedScaling, RanksWithoutAnyShardTakePart) {
  on_threads(GetParam(), [] {
    torch::nn::Linear model(torch::nn::LinearOptions(3, 1).bias(false));
    fully_shard(model); // one row: all but rank 0 have nothing
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(1));
    ShardedGradScaler scaler({.init_scale = 4});
    scaler.scale((model->weight * (rank() == 0 ? kInfinity : 1)).sum()).backward();
    scaler.step(optimizer);
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 2);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShardedScaling, ::testing::Values(1, 2, 4), ::testing::PrintToStringParamName());

} // namespace
} // namespace fsdp::testing
