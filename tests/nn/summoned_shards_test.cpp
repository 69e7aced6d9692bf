// What becomes of the shards while a guard shows their parameters whole, and of who trains.

#include "nn/parity.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class SummonedShards : public ::testing::TestWithParam<int> {};

/// As adapters are merged.
TEST_P(SummonedShards, AFrozenParameterStaysSoWhenAProductIsAddedInAGuard) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    model[0]->as<nn::Linear>()->weight.set_requires_grad(false);
    fully_shard(*model);
    {
      const auto guard = summon_full_params(*model);
      auto base = model->named_parameters()["0.weight"];
      base.fill_(1);
      base.add_(model->named_parameters()["1.weight"] * 0);
    }
    EXPECT_FALSE(model->named_parameters()["0.weight"].requires_grad());
    EXPECT_TRUE(torch::equal(whole_of(*model, "0.weight"), torch::ones({4, 4})));
  });
}

TEST_P(SummonedShards, ShardsFromBeforeFollowWhatAGuardWrites) {
  on_threads(GetParam(), [] {
    const torch::NoGradGuard no_grad;
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    fully_shard(*model[0]);
    fully_shard(*model);
    const auto shards = model->parameters();
    const auto expect_all = [&](float value) {
      for (const auto& shard : shards) {
        EXPECT_TRUE(torch::equal(shard + 0, torch::full_like(shard, value)));
      }
    };
    const auto fill = [&](float value) {
      for (auto& whole : model->parameters()) {
        whole.fill_(value);
      }
    };
    {
      const auto guard = summon_full_params(*model);
      fill(2);
      if (rank() == 0) { // alone
        expect_all(2);
      }
      fill(3);
      barrier();
      expect_all(3);
      EXPECT_TRUE(torch::equal(sharded(shards[0]).full_tensor(), torch::full({3, 5}, 3.0)));
      fill(4);
    }
    expect_all(4);
    {
      const auto guard = summon_full_params(*model, {.writeback = false});
      fill(5);
      expect_all(4);
    }
    expect_all(4);
  });
}

TEST_P(SummonedShards, WhatIsFrozenInAGuardIsFrozen) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    fully_shard(*model[0]);
    fully_shard(*model);
    for (const bool writeback : {true, false}) {
      for (const bool wanted : {false, true}) {
        {
          const auto guard = summon_full_params(*model, {.writeback = writeback});
          model->named_parameters()["0.weight"].set_requires_grad(wanted);
        }
        EXPECT_EQ(model->named_parameters()["0.weight"].requires_grad(), wanted);
        EXPECT_EQ(model[0]->as<nn::Linear>()->weight.requires_grad(), wanted);
        model->zero_grad();
        model->forward(torch::ones({2, 5})).sum().backward();
        EXPECT_EQ(model->named_parameters()["0.weight"].grad().defined(), wanted);
        EXPECT_TRUE(model->named_parameters()["0.bias"].grad().defined());
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SummonedShards, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
