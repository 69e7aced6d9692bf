// Models that are sharded without values, and get memory for this rank's pieces only.

#include <torch/script.h>

#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class Meta : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Meta, ::testing::Values(1, 2, 3, 4));

Trial from_meta(MakeSubject make, FullyShardOptions options = {}) {
  return {.make = std::move(make), .options = std::move(options), .steps = 3, .from_meta = true};
}

TEST_P(Meta, ModelsTrainAsThoseThatWereBuiltWithValues) {
  for (const auto& make : {subjects::mlp, subjects::convolutions, subjects::recurrent, subjects::odd}) {
    expect_parity(from_meta([make] { return make(); }), GetParam());
  }
  expect_parity(from_meta([] { return subjects::tied(); }), GetParam());
}

TEST_P(Meta, LowPrecisionAndOffloadToo) {
  const FullyShardOptions options{
      .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat},
      .offload_policy = CPUOffloadPolicy{}};
  expect_parity(from_meta([] { return subjects::tied(); }, options), GetParam());
}

TEST(MetaOnProcesses, OverGlooToo) {
  on_processes(3, [] {
    const auto trial = from_meta([] { return subjects::tied(); });
    const auto reference = train_unsharded(trial, {3});
    init({.backend = "gloo", .device = "cpu"});
    train_sharded(trial, reference);
    shutdown();
  });
}

// Each rank draws all numbers, so that they are those of a process that draws them alone.
TEST(MetaOnProcesses, ResetParametersGivesTheValuesOfAnUnshardedModel) {
  on_processes(2, [] {
    init({.device = "cpu"});
    const auto build = [] {
      torch::manual_seed(5);
      nn::Sequential layers;
      layers->push_back(nn::Linear(5, 7));
      layers->push_back(nn::LayerNorm(nn::LayerNormOptions({7})));
      layers->push_back(nn::Linear(7, 3));
      layers->push_back(nn::LSTM(3, 4)); // which goes over its parameters()
      return layers;
    };
    const nn::Sequential built = build();
    nn::Sequential model = build();
    move_to_meta(*model);
    fully_shard(*model[0]);
    fully_shard(*model);
    to_empty(*model);
    torch::manual_seed(5);
    model[0]->as<nn::Linear>()->reset_parameters();
    model[1]->as<nn::LayerNorm>()->reset_parameters();
    model[2]->as<nn::Linear>()->reset_parameters();
    model[3]->as<nn::LSTM>()->reset_parameters();
    for (const auto& item : built->named_parameters()) {
      expect_same(whole_of(*model, item.key()), item.value().detach(), item.key());
    }
    shutdown();
  });
}

TEST(MetaOnProcesses, RandomNumbersOfShardsAreThoseOfTheWhole) {
  on_processes(2, [] {
    init({.device = "cpu"});
    const torch::NoGradGuard no_grad;
    nn::Linear model(4, 6), plain(4, 6);
    fully_shard(*model, {.shard_placement_fn = [](const at::Tensor& parameter, const std::string&) {
      return std::optional(ShardPlacement{.dim = parameter.dim() - 1});
    }});
    const std::vector<std::function<void(at::Tensor)>> draws = {
        [](at::Tensor tensor) { tensor.uniform_(-1, 1); },
        [](at::Tensor tensor) { tensor.normal_(2, 3); },
        [](at::Tensor tensor) { tensor.data().random_(0, 9); },
        [](at::Tensor tensor) { tensor.detach().bernoulli_(0.5); },
        [](at::Tensor tensor) { tensor.exponential_(); },
        [](at::Tensor tensor) { nn::init::uniform_(tensor); }};
    for (const auto& draw : draws) {
      for (auto* each : {&model, &plain}) {
        torch::manual_seed(3);
        for (const auto& parameter : (*each)->parameters()) {
          draw(parameter);
        }
      }
      expect_same(whole_of(*model, "weight"), plain->weight.detach(), "weight");
      expect_same(whole_of(*model, "bias"), plain->bias.detach(), "bias");
      EXPECT_TRUE(torch::equal(model->weight, plain->weight));
    }
    shutdown();
  });
}

TEST_P(Meta, NothingIsReadBeforeThereIsMemory) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    move_to_meta(*model);
    fully_shard(*model[1]);
    fully_shard(*model);
    const auto said = error_message([&] { model->forward(torch::ones({2, 4})); });
    EXPECT_TRUE(contains(said, "still on meta device") && contains(said, "0.weight") && contains(said, "to_empty"))
        << said;
    for (const auto& shard : model->parameters()) {
      EXPECT_TRUE(shard.is_meta());
    }
    to_empty(*model);
    const c10::AutoGradMode no_grad(false);
    for (const auto& shard : model->parameters()) {
      EXPECT_FALSE(shard.is_meta());
      shard.fill_(1);
    }
    EXPECT_TRUE(torch::equal(model->forward(torch::ones({2, 4})), torch::full({2, 4}, 21.0)));
  });
}

TEST_P(Meta, WritesMayBeNotedBeforeThereIsMemory) {
  on_threads(GetParam(), [] {
    nn::Linear model(3, 4);
    move_to_meta(*model);
    fully_shard(*model).note_shard_writes();
    to_empty(*model);
    const torch::NoGradGuard no_grad;
    for (auto& shard : model->parameters()) {
      shard.fill_(1);
    }
    EXPECT_TRUE(model->forward(torch::ones({1, 3})).eq(4).all().item<bool>());
  });
}

TEST_P(Meta, AnOptimizerMayBeBuiltBefore) {
  on_threads(GetParam(), [] {
    nn::Linear model(3, 5);
    move_to_meta(*model);
    const NamedTensors values{{"weight", torch::linspace(0, 1, 15).view({5, 3})}, {"bias", torch::ones({5})}};
    fully_shard(*model);
    torch::optim::SGD optimizer(model->parameters(), 0.5);
    give_memory_and_values(*model, values);
    model->forward(torch::ones({1, 3})).sum().backward();
    optimizer.step();
    expect_same(whole_of(*model, "bias"), values.at("bias") - 0.5, "bias");
    expect_same(whole_of(*model, "weight"), values.at("weight") - 0.5, "weight");
  });
}

TEST(MetaModels, BuffersAndIgnoredParametersGetMemory) {
  on_threads(2, [] {
    nn::Sequential model(nn::Linear(4, 4), nn::BatchNorm1d(4));
    auto ignored = model->register_parameter("ignored", torch::ones({2}));
    move_to_meta(*model);
    fully_shard(*model, {.ignored_params = {ignored}});
    to_empty(*model);
    EXPECT_TRUE(ignored.is_cpu());
    auto& norm = *model[1]->as<nn::BatchNorm1d>();
    EXPECT_TRUE(norm.running_mean.is_cpu()); // the module's own member
    norm.reset_running_stats();
    EXPECT_TRUE(torch::equal(norm.running_var, torch::ones({4})));
  });
}

TEST(MetaModels, WhatIsFrozenStaysSo) {
  on_threads(2, [] {
    nn::Linear model(4, 4);
    model->bias.set_requires_grad(false);
    const auto values = move_to_meta(*model);
    fully_shard(*model);
    give_memory_and_values(*model, values);
    model->forward(torch::ones({1, 4})).sum().backward();
    EXPECT_FALSE(model->bias.requires_grad());
    EXPECT_TRUE(sharded(model->parameters()[0]).grad().defined());
    EXPECT_FALSE(sharded(model->parameters()[1]).grad().defined());
  });
}

TEST(MetaModels, ATorchScriptModuleIsRefused) {
  on_threads(1, [] {
    torch::jit::Module module("Net");
    module.register_parameter("weight", torch::empty({4}, torch::kMeta), /*is_buffer=*/false);
    const auto said = error_message([&] { fully_shard(module); });
    EXPECT_TRUE(contains(said, "materialized from the meta device") && contains(said, "weight")) << said;
  });
}

} // namespace
} // namespace fsdp::testing
