#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/clip_grad_norm.h>
#include <fsdp/error.h>
#include <fsdp/fully_shard.h>
#include <fsdp/init.h>
#include <fsdp/optim.h>
#include <fsdp/sharded_tensor.h>

#include "support/counting_group.h"
#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp {
namespace {

using testing::on_threads;
using torch::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Sizes that no number of ranks divides; with four ranks some shards are empty.
struct NetImpl : torch::nn::Module {
  torch::nn::Linear first{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear second{nullptr};
  Tensor temperature;

  NetImpl()
      : first(register_module("first", torch::nn::Linear(7, 13))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({13})))),
        second(register_module("second", torch::nn::Linear(13, 3))),
        temperature(register_parameter("temperature", torch::tensor(1.5))) {}

  Tensor forward(const Tensor& x) {
    return second(torch::gelu(norm(first(x)))) * temperature;
  }
};
TORCH_MODULE(Net);

// Built alike by all ranks, without the process's generator, which threads share.
Net make_net() {
  Net net;
  torch::NoGradGuard no_grad;
  uint64_t seed = 1;
  for (Tensor& param : net->parameters()) {
    param.copy_(torch::randn(param.sizes(), torch::make_generator<at::CPUGeneratorImpl>(seed++)) * 0.3);
  }
  return net;
}

Tensor loss_of(Net& net, uint64_t step) {
  const Tensor x = torch::randn({6, 7}, torch::make_generator<at::CPUGeneratorImpl>(step + 50));
  return net(x).square().mean();
}

void shard(Net& net, const FullyShardOptions& options = {}) {
  fully_shard(*net->first, options);
  fully_shard(*net, options);
}

torch::optim::AdamWOptions adamw_options() {
  return torch::optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true);
}

// What ranks with equal data make of their gradients: the sum in rank order, divided. Not always the same bits, for
// three ranks.
void average_equal_gradients(Net& net, int ranks) {
  for (const Tensor& param : net->parameters()) {
    const Tensor one = param.grad().clone();
    for (int i = 1; i < ranks; ++i) {
      param.grad().add_(one);
    }
    param.grad().div_(ranks);
  }
}

// Losses of some steps with clipping. For an unsharded model, `ranks` says whose training to follow.
std::vector<double> train(Net& net, double max_norm, int steps, int ranks = 1) {
  optim::AdamW optimizer(parameters(*net), adamw_options());
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    Tensor loss = loss_of(net, static_cast<uint64_t>(step));
    loss.backward();
    if (ranks > 1) {
      average_equal_gradients(net, ranks);
    }
    clip_grad_norm_(*net, max_norm);
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

std::vector<Tensor> wholes_of(Net& net) {
  std::vector<Tensor> wholes;
  for (const Tensor& param : parameters(*net)) {
    wholes.push_back((is_sharded(param) ? sharded(param).full_tensor() : param).detach().clone());
  }
  return wholes;
}

class OnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OnRanks, ::testing::Values(1, 2, 3, 4));

// AdamW treats every element alike: not one bit may differ.
TEST_P(OnRanks, AdamWOnShardsHasTheBitsOfAdamWOnTheWhole) {
  Net reference = make_net();
  const auto expected = train(reference, /*max_norm=*/1e9, 5, GetParam());
  const auto expected_wholes = wholes_of(reference);
  on_threads(GetParam(), [&] {
    Net net = make_net();
    shard(net);
    EXPECT_EQ(train(net, /*max_norm=*/1e9, 5), expected);
    const auto wholes = wholes_of(net);
    ASSERT_EQ(wholes.size(), expected_wholes.size());
    for (size_t i = 0; i < wholes.size(); ++i) {
      EXPECT_TRUE(torch::equal(wholes[i], expected_wholes[i])) << i;
    }
  });
}

TEST_P(OnRanks, TrainsAlikeWithClippedGradients) {
  Net reference = make_net();
  const auto expected = train(reference, /*max_norm=*/0.05, 5, GetParam());
  on_threads(GetParam(), [&] {
    Net net = make_net();
    shard(net);
    const auto losses = train(net, /*max_norm=*/0.05, 5);
    for (size_t i = 0; i < losses.size(); ++i) {
      EXPECT_NEAR(losses[i], expected[i], 1e-5) << i;
    }
  });
}

TEST_P(OnRanks, StateLivesOnShardsOnly) {
  on_threads(GetParam(), [] {
    Net net = make_net();
    shard(net);
    optim::AdamW optimizer(net->parameters(), adamw_options());
    loss_of(net, 0).backward();
    optimizer.step();
    for (const Tensor& param : net->parameters()) {
      const auto& state =
          static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
      EXPECT_EQ(state.exp_avg().sizes(), param.sizes());
      EXPECT_EQ(state.step(), 1);
    }
  });
}

// Norm and clipped whole gradients are those of the unsharded model, also with a parameter that is not sharded.
TEST_P(OnRanks, NormIsThatOfTheWholeModel) {
  for (const double norm_type : {1.0, 2.0, 3.0, kInfinity}) {
    Net reference = make_net();
    loss_of(reference, 0).backward();
    const double norm = clip_grad_norm_(*reference, 0.1, {.norm_type = norm_type}).item<double>();
    const Tensor clipped = reference->first->weight.grad();
    on_threads(GetParam(), [&] {
      Net net = make_net();
      shard(net, {.ignored_params = {net->temperature}});
      loss_of(net, 0).backward();
      EXPECT_NEAR(clip_grad_norm_(*net, 0.1, {.norm_type = norm_type}).item<double>(), norm, 1e-5 * norm) << norm_type;
      for (const auto& [name, param] : named_parameters(*net)) {
        ASSERT_EQ(is_sharded(param), name != "temperature");
        if (name == "first.weight") {
          EXPECT_TRUE(torch::allclose(sharded(param).full_grad(), clipped, 1e-4, 1e-7));
        }
      }
    });
  }
}

TEST_P(OnRanks, RanksWithoutGradientsJoinAllTheSame) {
  const int ranks = GetParam();
  on_threads(ranks, [] {
    Net net = make_net();
    shard(net);
    EXPECT_EQ(clip_grad_norm_(*net, 1.0).item<double>(), 0);
    // Only the first rank has a gradient: its rows of first.weight.
    const Tensor weight = net->first->parameters()[0];
    if (rank() == 0) {
      weight.mutable_grad() = torch::full(weight.sizes(), 2.0);
    }
    const double elements = 7 * std::ceil(13.0 / world_size());
    EXPECT_NEAR(clip_grad_norm_(*net, 1.0).item<double>(), 2 * std::sqrt(elements), 1e-4);
  });
}

TEST_P(OnRanks, NotANumberOnOneRankReachesAll) {
  for (const double norm_type : {2.0, kInfinity}) {
    on_threads(GetParam(), [norm_type] {
      Net net = make_net();
      shard(net);
      loss_of(net, 0).backward();
      if (rank() == 0) {
        net->first->parameters()[0].grad().fill_(std::nan(""));
      }
      EXPECT_TRUE(std::isnan(clip_grad_norm_(*net, 1.0, {.norm_type = norm_type}).item<double>()));
      EXPECT_THROW(clip_grad_norm_(*net, 1.0, {.norm_type = norm_type, .error_if_nonfinite = true}), Error);
    });
  }
}

/// An optimizer that was given the parameters before they were sharded says so; and has changed nothing, unless it
/// writes a parameter before it looks for its gradient.
template <typename Optimizer, typename Options>
void expect_refused(const Options& options, bool writes_first = false) {
  on_threads(2, [&] {
    Net net = make_net();
    Optimizer optimizer(net->parameters(), options);
    shard(net);
    const auto before = wholes_of(net);
    for (int step = 0; step < 2; ++step) {
      loss_of(net, 0).backward();
      const auto said = testing::error_message([&] { optimizer.step(); });
      EXPECT_TRUE(testing::contains(said, "Build the optimizer from the model's parameters() after fully_shard"))
          << said;
      const auto after = wholes_of(net);
      for (size_t i = writes_first ? 1 : 0; i < before.size(); ++i) {
        EXPECT_TRUE(torch::equal(after[i], before[i])) << "parameter " << i << " has changed";
      }
    }
  });
}

TEST(OptimizerOfHandles, TorchAdamWIsRefused) {
  expect_refused<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0));
  expect_refused<torch::optim::AdamW>(adamw_options(), /*writes_first=*/true);
}

TEST(OptimizerOfHandles, TorchRMSpropIsRefused) {
  expect_refused<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-2));
  expect_refused<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-2).weight_decay(0.1).momentum(0.9));
}

TEST(OptimizerOfHandles, TorchSGDWithWeightDecayIsRefused) {
  expect_refused<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).weight_decay(0.1));
}

TEST(OptimizerOfHandles, OurAdamWIsRefused) {
  expect_refused<optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0));
  expect_refused<optim::AdamW>(adamw_options());
}

// Of units on one mesh, all partial norms travel together.
TEST_P(OnRanks, TheNormTakesOneAllReduce) {
  for (const double norm_type : {1.0, 2.0, kInfinity}) {
    on_threads(GetParam(), [norm_type] {
      const auto group = std::make_shared<testing::CountingGroup>(world());
      Net net = make_net();
      shard(net, {.mesh = Mesh::from_group(group, "shard")});
      loss_of(net, 0).backward();
      group->all_reduces = 0;
      clip_grad_norm_(*net, 0.1, {.norm_type = norm_type});
      EXPECT_EQ(group->all_reduces, world_size() == 1 ? 0 : 1) << norm_type;
    });
  }
}

// Replicas hold equal gradients: they are not added up. Units of different meshes meet in one norm.
TEST(ClipGradNormSharded, HybridAndSeveralMeshes) {
  for (const double norm_type : {1.0, 2.0, 3.0, kInfinity}) {
    Net reference = make_net();
    loss_of(reference, 0).backward();
    const double norm = clip_grad_norm_(*reference, 0.1, {.norm_type = norm_type}).item<double>();
    on_threads(4, [&] {
      const Mesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
      Net net = make_net();
      fully_shard(*net->first, {.mesh = mesh});
      fully_shard(*net->second, {.mesh = mesh["shard"]});
      fully_shard(*net);
      loss_of(net, 0).backward();
      EXPECT_NEAR(clip_grad_norm_(*net, 0.1, {.norm_type = norm_type}).item<double>(), norm, 1e-5 * norm) << norm_type;
      const auto clipped = sharded(net->named_parameters()["second.weight"]).full_grad();
      EXPECT_TRUE(torch::allclose(clipped, reference->second->weight.grad(), 1e-4, 1e-7)) << norm_type;
    });
  }
}

// Shards that were given other data are shards: their squares are summed over the ranks.
TEST_P(OnRanks, TheNormRightAfterTo) {
  on_threads(GetParam(), [] {
    Net net = make_net();
    shard(net);
    loss_of(net, 0).backward();
    const double before = clip_grad_norm_(*net, 1e9).item<double>();
    net->to(torch::kDouble);
    EXPECT_NEAR(clip_grad_norm_(net->parameters(), 1e9).item<double>(), before, 1e-6 * before);
    EXPECT_NEAR(clip_grad_norm_(*net, 1e9).item<double>(), before, 1e-6 * before);
  });
}

// LibTorch adds squares in float32, we in float64: the header says by how much they differ.
TEST(ClipGradNormAgainstTorch, IsTheSameUpToItsRounding) {
  double farthest_norm = 0, farthest_gradient = 0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<Tensor> ours, theirs;
    for (const int64_t size : {3, 1000, 100003, 1000003}) {
      for (auto* list : {&ours, &theirs}) {
        list->push_back(torch::zeros({size}).requires_grad_());
        list->back().mutable_grad() = torch::randn({size}, torch::make_generator<at::CPUGeneratorImpl>(seed));
      }
    }
    const double wanted = torch::nn::utils::clip_grad_norm_(theirs, 1.0);
    farthest_norm = std::max(farthest_norm, std::abs(clip_grad_norm_(ours, 1.0).item<double>() / wanted - 1));
    for (size_t i = 0; i < ours.size(); ++i) {
      const Tensor distance = (ours[i].grad() / theirs[i].grad() - 1).abs();
      farthest_gradient = std::max(farthest_gradient, distance.max().item<double>());
    }
  }
  EXPECT_LT(farthest_norm, 3e-5);
  EXPECT_LT(farthest_gradient, 3e-5);
}

TEST_P(OnRanks, ShardsOfSeveralDtypesTakeOneAllReduceToo) {
  on_threads(GetParam(), [] {
    const auto group = std::make_shared<testing::CountingGroup>(world());
    Net net = make_net();
    net->first->to(torch::kBFloat16);
    net->second->to(torch::kDouble);
    shard(net, {.mesh = Mesh::from_group(group, "shard")});
    double elements = 0;
    for (Tensor& param : net->parameters()) {
      param.mutable_grad() = torch::full(param.sizes(), 3.0, torch::TensorOptions().dtype(param.scalar_type()));
      elements += static_cast<double>(sharded(param).numel());
    }
    group->all_reduces = 0;
    EXPECT_NEAR(clip_grad_norm_(*net, 1.0).item<double>(), 3 * std::sqrt(elements), 1e-4);
    EXPECT_EQ(group->all_reduces, world_size() == 1 ? 0 : 1);
  });
}

} // namespace
} // namespace fsdp
