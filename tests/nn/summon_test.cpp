// Summoned parameters are whole and plain, and what is written to them reaches the shards.

#include "engine/unit.h"
#include "nn/parity.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class Summon : public ::testing::TestWithParam<int> {};

TEST_P(Summon, GivesWholePlainParameters) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    fully_shard(*model[0]);
    fully_shard(*model);
    model->forward(torch::ones({2, 5})).sum().backward();
    const auto gradient = sharded(model->parameters()[0]).full_grad();
    {
      auto guard = summon_full_params(*model, {.with_grads = true});
      for (const auto& item : model->named_parameters()) {
        EXPECT_FALSE(is_sharded(item.value()));
      }
      auto weight = model->named_parameters()["0.weight"];
      EXPECT_EQ(weight.sizes(), (std::vector<int64_t>{3, 5}));
      EXPECT_TRUE(torch::equal(weight.grad(), gradient));
      torch::NoGradGuard no_grad;
      weight.mutable_grad().mul_(3);
      weight.fill_(2);
      EXPECT_TRUE(torch::equal(model[0]->as<nn::Linear>()->weight + 0, torch::full({3, 5}, 2.0)));
    }
    EXPECT_TRUE(is_sharded(model->parameters()[0]));
    EXPECT_TRUE(torch::equal(whole_of(*model, "0.weight"), torch::full({3, 5}, 2.0)));
    EXPECT_TRUE(torch::equal(sharded(model->parameters()[0]).full_grad(), gradient * 3));
    {
      auto guard = summon_full_params(*model, {.writeback = false, .rank0_only = true, .offload_to_cpu = true});
      EXPECT_EQ(is_sharded(model->parameters()[0]), rank() != 0);
      if (rank() == 0) {
        torch::NoGradGuard no_grad;
        model->parameters()[0].fill_(9);
      }
    }
    EXPECT_TRUE(torch::equal(whole_of(*model, "0.weight"), torch::full({3, 5}, 2.0)));
    {
      auto guard = summon_full_params(*model, {.recurse = false});
      EXPECT_TRUE(is_sharded(model->named_parameters()["0.weight"]));
      EXPECT_FALSE(is_sharded(model->named_parameters()["1.weight"]));
    }
  });
}

TEST_P(Summon, OnTheHostIsWrittenBackUnitByUnit) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2), nn::Linear(2, 2));
    fully_shard(*model[0]);
    fully_shard(*model[1]);
    fully_shard(*model);
    {
      auto guard = summon_full_params(*model, {.offload_to_cpu = true});
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        parameter.fill_(static_cast<double>(parameter.numel()));
      }
    }
    for (const auto& [name, shard] : named_parameters(*model)) {
      const auto whole = sharded(shard).full_tensor();
      EXPECT_TRUE(torch::equal(whole, torch::full_like(whole, static_cast<double>(whole.numel())))) << name;
    }
  });
}

TEST_P(Summon, TheEndSaysWhatCouldNotBeWrittenBack) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    auto first = fully_shard(*model[0]), second = fully_shard(*model[1]);
    auto guard = summon_full_params(*model, {.offload_to_cpu = true});
    {
      torch::NoGradGuard no_grad;
      model->parameters()[0].set_data(torch::zeros({7}));
      model->parameters()[2].fill_(4);
    }
    const auto said = error_message([&] { guard.end(); });
    EXPECT_TRUE(contains(said, "[summon_full_params] 'weight' has shape [7]")) << said;
    EXPECT_EQ(first.unit()->held, 0);
    EXPECT_TRUE(torch::equal(whole_of(*model, "1.weight"), torch::full({2, 3}, 4.0)));
    model->forward(torch::ones({2, 5})).sum().backward();
    guard.end(); // nothing is left to end
  });
}

TEST_P(Summon, ParametersMayBeForgotten) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 3);
    auto unit = fully_shard(*model);
    {
      auto guard = summon_full_params(*model);
      unit.reset_iter_state();
    }
    model->forward(torch::ones({2, 4})).sum().backward();
    EXPECT_EQ(unit.unit()->state(), engine::UnitState::kSharded);
  });
}

TEST_P(Summon, AnErrorLeavesEverythingSharded) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    auto first = fully_shard(*model[0]), second = fully_shard(*model[1]); // two roots
    auto loss = model[1]->as<nn::Linear>()->forward(torch::ones({2, 4})).sum();
    EXPECT_THROW(summon_full_params(*model), Error);
    EXPECT_TRUE(is_sharded(model->parameters()[0]));
    EXPECT_EQ(first.unit()->state(), engine::UnitState::kSharded);
    EXPECT_EQ(first.unit()->held, 0);
    loss.backward();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Summon, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
