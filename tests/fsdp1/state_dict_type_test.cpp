// One setting for the form of a model's state dicts.

#include <map>
#include <mutex>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using Wrapped = FullyShardedDataParallel<torch::nn::Sequential>;
using enum StateDictType;

torch::nn::Sequential make_net(int seed) {
  static std::mutex mutex; // ranks that are threads share one random number generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(3, 5), torch::nn::BatchNorm1d(5), torch::nn::Linear(5, 2));
}

Wrapped make_wrapped(int seed, FSDPOptions options = {}) {
  options.auto_wrap_policy = ModuleWrapPolicy::of<torch::nn::Linear>();
  return Wrapped(make_net(seed), options);
}

std::vector<std::string> keys_of(const AnyStateDict& state) {
  return std::visit([](const auto& dict) { return dict.keys(); }, state);
}

StateDict whole_values(Wrapped& model) {
  return full_state_dict(model);
}

void expect_equal(const StateDict& got, const StateDict& wanted) {
  ASSERT_EQ(got.keys(), wanted.keys());
  for (const auto& item : wanted) {
    EXPECT_TRUE(got[item.key()].equal(item.value())) << item.key();
  }
}

class StateDictTypes : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, StateDictTypes, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

TEST_P(StateDictTypes, AreWholeValuesUnlessSetOtherwise) {
  on_threads(GetParam(), [] {
    auto model = make_wrapped(1);
    const auto state = state_dict(model);
    expect_equal(std::get<StateDict>(state), whole_values(model));
    auto other = make_wrapped(2);
    load_state_dict(other, state);
    expect_equal(whole_values(other), whole_values(model));
    const auto one_rank = state_dict_type(model, kFullStateDict, FullStateDictConfig{.rank0_only = true});
    EXPECT_EQ(std::get<StateDict>(state_dict(model)).is_empty(), rank() != 0);
  });
}

TEST_P(StateDictTypes, GiveEachRankItsPieces) {
  on_threads(GetParam(), [] {
    for (const bool original : {false, true}) {
      auto model = make_wrapped(1, {.use_orig_params = original}),
           other = make_wrapped(2, {.use_orig_params = original});
      const auto guard = state_dict_type(model, kShardedStateDict, ShardedStateDictConfig{.offload_to_cpu = true});
      const auto state = state_dict(model);
      EXPECT_EQ(keys_of(state), whole_values(model).keys());
      if (world_size() == 1) { // where nothing is cut
        EXPECT_TRUE(std::holds_alternative<StateDict>(state));
        continue;
      }
      const auto weight = std::get<ShardedStateDict>(state)["0.weight"];
      EXPECT_EQ(weight.sizes, (std::vector<int64_t>{5, 3}));
      load_state_dict(other, state);
      expect_equal(whole_values(other), whole_values(model));
      {
        torch::NoGradGuard no_grad;
        for (auto& parameter : model->parameters()) {
          parameter.fill_(7);
        }
      }
      EXPECT_TRUE(weight.local.numel() == 0 || weight.local.max().item<float>() < 7) << "a copy";
    }
  });
}

TEST_P(StateDictTypes, GiveFlatParametersAsTheyLieHere) {
  on_threads(GetParam(), [] {
    if (world_size() == 1) {
      return; // where nothing is cut
    }
    auto model = make_wrapped(1), other = make_wrapped(2);
    const auto guard = state_dict_type(model, kLocalStateDict), same = state_dict_type(other, kLocalStateDict);
    const auto state = std::get<StateDict>(state_dict(model));
    ASSERT_TRUE(state.contains("0._flat_param") && state.contains("1.running_mean") && state.contains("_flat_param"));
    EXPECT_FALSE(state.contains("0.weight"));
    EXPECT_EQ(state["0._flat_param"].numel(), (20 + world_size() - 1) / world_size());
    EXPECT_EQ(state["0._flat_param"].data_ptr(), model->named_parameters()["0._flat_param"].data_ptr());
    load_state_dict(other, AnyStateDict(state));
    expect_equal(whole_values(other), whole_values(model));
  });
}

TEST_P(StateDictTypes, SayWhatIsWrongWithFlatParametersAndLoadNone) {
  on_threads(GetParam(), [] {
    if (world_size() == 1) {
      return; // where nothing is cut
    }
    auto model = make_wrapped(1), original = make_wrapped(1, {.use_orig_params = true});
    const auto guard = state_dict_type(model, kLocalStateDict), other = state_dict_type(original, kLocalStateDict);
    const auto before = whole_values(model);
    auto state = std::get<StateDict>(state_dict(model));
    state["0._flat_param"] = torch::zeros({1000});
    state.erase("2._flat_param");
    state.insert("3._flat_param", torch::zeros({1}));
    const auto message = error_message([&] { load_state_dict(model, AnyStateDict(state)); });
    EXPECT_TRUE(contains(message, "'0._flat_param' has sizes")) << message;
    EXPECT_TRUE(contains(message, "missing: 2._flat_param")) << message;
    EXPECT_TRUE(contains(message, "unexpected: 3._flat_param")) << message;
    expect_equal(whole_values(model), before);
    EXPECT_TRUE(contains(error_message([&] { state_dict(original); }), "use_orig_params = true does not show"));
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    EXPECT_TRUE(contains(error_message([&] { optim_state_dict(model, optimizer); }), "use kShardedStateDict"));
  });
}

TEST_P(StateDictTypes, AreWholeValuesWhereNothingIsCut) {
  on_threads(GetParam(), [] {
    auto model = make_wrapped(1, {.sharding_strategy = ShardingStrategy::kNoShard});
    for (const auto type : {kLocalStateDict, kShardedStateDict}) {
      const auto guard = state_dict_type(model, type);
      expect_equal(std::get<StateDict>(state_dict(model)), whole_values(model));
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      EXPECT_TRUE(std::holds_alternative<OptimStateDict>(optim_state_dict(model, optimizer)));
    }
  });
}

std::map<std::string, HeldTensor> buffers_in(const AnyStateDict& state) {
  std::map<std::string, HeldTensor> buffers;
  for (const std::string name : {"1.running_mean", "1.running_var", "1.num_batches_tracked"}) {
    const auto* whole = std::get_if<StateDict>(&state);
    buffers[name] = whole != nullptr ? HeldTensor{.local = (*whole)[name]} : std::get<ShardedStateDict>(state)[name];
  }
  return buffers;
}

TEST_P(StateDictTypes, HaveLoweredBuffersInTheirFormerDtype) {
  on_threads(GetParam(), [] {
    FSDPOptions options;
    options.mixed_precision = {
        .param_dtype = torch::kBFloat16, .buffer_dtype = torch::kBFloat16, .module_classes_to_ignore = {}};
    for (const auto type : {kFullStateDict, kShardedStateDict, kLocalStateDict}) {
      auto model = make_wrapped(1, options), other = make_wrapped(2, options);
      const auto guard = state_dict_type(model, type), same = state_dict_type(other, type);
      EXPECT_EQ(buffers_in(state_dict(model))["1.running_var"].dtype(), torch::kFloat);
      model(torch::ones({4, 3}) * (1 + rank()));
      other(torch::zeros({4, 3}));
      const auto state = state_dict(model);
      load_state_dict(other, state);
      for (const auto& [name, saved] : buffers_in(state)) {
        const auto buffer = model->named_buffers()[name];
        const bool is_count = name == "1.num_batches_tracked";
        EXPECT_EQ(saved.dtype(), is_count ? torch::kLong : torch::kFloat) << name;
        EXPECT_EQ(buffer.scalar_type(), is_count ? torch::kLong : torch::kBFloat16) << name;
        EXPECT_TRUE(saved.local.equal(buffer.to(saved.dtype()))) << name;
        EXPECT_TRUE(other->named_buffers()[name].equal(buffer)) << name;
      }
    }
  });
}

TEST_P(StateDictTypes, NestAndAreRestored) {
  on_threads(GetParam(), [] {
    auto model = make_wrapped(1);
    const auto type = [&] { return get_state_dict_type(model).state_dict_type; };
    EXPECT_EQ(type(), kFullStateDict);
    {
      const auto outer = state_dict_type(model, kShardedStateDict);
      EXPECT_EQ(type(), kShardedStateDict);
      {
        const auto inner = state_dict_type(model, kLocalStateDict);
        EXPECT_EQ(type(), kLocalStateDict);
        EXPECT_EQ(get_state_dict_type(model->ptr(0)).state_dict_type, kLocalStateDict) << "inner instances follow";
      }
      EXPECT_EQ(type(), kShardedStateDict);
    }
    EXPECT_EQ(type(), kFullStateDict);
    const auto former = set_state_dict_type(
        model, kFullStateDict, FullStateDictConfig{.rank0_only = true}, FullOptimStateDictConfig{{.rank0_only = true}});
    EXPECT_FALSE(std::get<FullStateDictConfig>(former.state_dict_config).rank0_only);
    const auto now = get_state_dict_type(model);
    EXPECT_TRUE(std::get<FullStateDictConfig>(now.state_dict_config).rank0_only);
    EXPECT_TRUE(std::get<FullOptimStateDictConfig>(now.optim_state_dict_config).rank0_only);
    set_state_dict_type(model->ptr(0), kShardedStateDict);
    EXPECT_TRUE(contains(error_message([&] { get_state_dict_type(model); }), "must have the same"));
    const auto said = error_message([&] { set_state_dict_type(model, kFullStateDict); });
    EXPECT_TRUE(contains(said, "has others than the outermost: end its state_dict_type guard, or")) << said;
  });
}

TEST_P(StateDictTypes, OutliveTheirModel) {
  on_threads(GetParam(), [] {
    auto model = std::make_unique<Wrapped>(make_wrapped(1));
    const auto guard = state_dict_type(*model, kShardedStateDict);
    model.reset();
  });
}

TEST(StateDictTypeErrors, SayWhatToDo) {
  on_threads(1, [] {
    auto model = make_wrapped(1);
    const auto plain = make_net(1);
    const auto refusal = [&](const auto&... arguments) {
      return error_message([&] { set_state_dict_type(arguments...); });
    };
    EXPECT_TRUE(
        contains(refusal(model, kShardedStateDict, FullStateDictConfig()), "Expected state_dict_config of type"));
    EXPECT_TRUE(contains(
        refusal(model, kFullStateDict, std::nullopt, ShardedOptimStateDictConfig()),
        "Expected optim_state_dict_config of type"));
    EXPECT_TRUE(contains(refusal(plain, kFullStateDict), "has no FullyShardedDataParallel in it"));
    EXPECT_EQ(get_state_dict_type(model).state_dict_type, kFullStateDict);
  });
}

TEST_P(StateDictTypes, OfTheFirstRankAloneAreLoadedOnAll) {
  on_threads(GetParam(), [] {
    auto model = make_wrapped(1);
    torch::optim::Adam optimizer(model->parameters(), 0.1), other(model->parameters(), 0.2), third(other.parameters());
    model(torch::ones({4, 3}) * (rank() + 1)).sum().backward();
    optimizer.step();
    FullOptimStateDictConfig config;
    config.rank0_only = true;
    const auto guard = state_dict_type(model, kFullStateDict, std::nullopt, config);
    const auto state = optim_state_dict(model, optimizer);
    EXPECT_EQ(std::get<OptimStateDict>(state).state.is_empty(), rank() != 0);
    load_optim_state_dict(model, other, state);
    load_optim_state_dict(model, third, optim_state_dict_to_load(model, third, state));
    const auto whole = full_optim_state_dict(model, optimizer);
    for (const auto* loaded : {&other, &third}) {
      const auto got = full_optim_state_dict(model, *loaded);
      ASSERT_EQ(got.state.keys(), whole.state.keys());
      for (const auto& item : whole.state) {
        EXPECT_TRUE(got.state[item.key()].tensors.at("exp_avg").equal(item.value().tensors.at("exp_avg")));
      }
    }
  });
}

// Adam's step is the same in any form, and the states of flat parameters have the parameters' names.
TEST_P(StateDictTypes, AreThoseOfOptimizersToo) {
  on_threads(GetParam(), [] {
    for (const auto type : {kFullStateDict, kShardedStateDict}) {
      auto model = make_wrapped(1), other = make_wrapped(2);
      torch::optim::Adam optimizer(model->parameters(), 0.1), others(other->parameters(), 0.2);
      const auto step = [](Wrapped& wrapped, torch::optim::Adam& adam) {
        wrapped(torch::ones({4, 3}) * (rank() + 1)).sum().backward();
        adam.step();
        adam.zero_grad();
      };
      step(model, optimizer);
      const auto guard = state_dict_type(model, type), same = state_dict_type(other, type);
      const auto state = optim_state_dict(model, optimizer);
      const auto keys = std::visit([](const auto& dict) { return dict.state.keys(); }, state);
      EXPECT_EQ(keys.size(), 6u);
      EXPECT_EQ(std::count(keys.begin(), keys.end(), "2.weight"), 1);
      load_state_dict(other, state_dict(model));
      load_optim_state_dict(other, others, state);
      step(model, optimizer);
      step(other, others);
      expect_equal(whole_values(other), whole_values(model));
      const auto later = optim_state_dict(model, optimizer);
      step(model, optimizer);
      load_optim_state_dict(model, optimizer, optim_state_dict_to_load(model, optimizer, later));
      load_state_dict(model, state_dict(other));
      step(model, optimizer);
      step(other, others);
      expect_equal(whole_values(other), whole_values(model));
    }
  });
}

} // namespace
} // namespace fsdp::testing
