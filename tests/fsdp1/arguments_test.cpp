// Arguments that lead to something else than was asked for, with a warning, or to an error.

#include "fsdp1/train.h"
#include "fsdp1/two_layers.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

nn::Sequential half_frozen() {
  auto layers = two_layers();
  layers[0]->as<nn::Linear>()->bias.set_requires_grad(false);
  return layers;
}

std::string warnings_of(const std::function<void()>& body) {
  ::testing::internal::CaptureStderr();
  body();
  return ::testing::internal::GetCapturedStderr();
}

TEST(Warnings, SayWhatIsDoneInstead) {
  on_processes(1, [] {
    init({.device = "cpu"});
    EXPECT_TRUE(contains(
        warnings_of([] { const Wrapped model(two_layers()); }),
        "switching to use `NO_SHARD` instead of ShardingStrategy.FULL_SHARD since the world size is 1"));
    const FSDPOptions whole{.sharding_strategy = ShardingStrategy::kNoShard, .use_orig_params = true};
    EXPECT_EQ(warnings_of([&] { const Wrapped model(two_layers(), whole); }), "");
    EXPECT_TRUE(contains(
        warnings_of([&] { const Wrapped model(half_frozen(), whole); }), "does not recommend wrapping such modules"));
    EXPECT_TRUE(contains(
        warnings_of([&] { Wrapped(two_layers(), whole).clip_grad_norm_(1.0); }), "on rank 0 with no gradients"));
    EXPECT_TRUE(contains(
        warnings_of([&] {
          Wrapped model(two_layers(), whole);
          const auto guard = state_dict_type(model, StateDictType::kShardedStateDict);
          state_dict(model);
        }),
        "kNoShard leaves nothing to cut"));
    EXPECT_TRUE(contains(
        warnings_of([&] {
          auto layers = two_layers();
          FSDPOptions options = whole;
          options.ignored_modules = {layers};
          const Wrapped model(layers, options);
        }),
        "Trying to ignore the top-level module"));
    EXPECT_TRUE(contains(
        warnings_of([&] {
          FSDPOptions options = whole;
          options.auto_wrap_policy = linears();
          options.mixed_precision.param_dtype = torch::kBFloat16;
          const Wrapped model(nn::Sequential(nn::Linear(4, 4), nn::BatchNorm1d(4)), options);
        }),
        "will be wrapped as separate units with mixed precision disabled"));
    shutdown();
  });
}

TEST(Policies, LookAtWhatIsFrozenOfEachUnit) {
  on_threads(2, [] {
    EXPECT_TRUE(contains(
        error_message([] { const Wrapped model(half_frozen(), {.auto_wrap_policy = linears()}); }),
        "has both parameters with requires_grad=True and False"));
    auto layers = half_frozen();
    const Wrapped model(layers, {.auto_wrap_policy = linears(), .ignored_states = {layers[0]->as<nn::Linear>()->bias}});
    EXPECT_EQ(model->named_parameters().keys(), (std::vector<std::string>{"0.bias", "0._flat_param", "1._flat_param"}));
  });
}

TEST(FirstForwards, LookAtWhatAllUnitsShare) {
  on_threads(2, [] {
    auto layers = two_layers();
    fsdp::detail::wrap_module(*layers[0], {.limit_all_gathers = false});
    Wrapped model(layers);
    EXPECT_TRUE(contains(
        error_message([&] {
          model(torch::ones({1, 4}));
        }),
        "Expects one homogeneous value for limit_all_gathers"));
  });
}

TEST(IgnoredModules, NeedNotBeTheSameOnAllRanksNorInTheModel) {
  on_threads(3, [] {
    auto layers = two_layers();
    FSDPOptions options;
    std::vector<nn::Linear> strangers;
    for (int i = 0; i <= rank(); ++i) {
      nn::Linear own(4, 4);
      strangers.emplace_back(4, 4);
      layers->push_back(own);
      options.ignored_modules.insert(options.ignored_modules.end(), {own, strangers.back()});
    }
    Wrapped model(layers, options);
    model(torch::ones({1, 4})).sum().backward();
    const auto named = model->named_parameters();
    EXPECT_EQ(named.size(), 1 + 2 * (rank() + 1));
    for (const auto& item : named) {
      EXPECT_TRUE(item.value().grad().defined()) << item.key();
    }
  });
}

TEST(Devices, AreThoseOfTheGroup) {
  on_threads(2, [] {
    FSDPOptions options;
    options.device_id = c10::Device(c10::kCUDA, 0);
    EXPECT_TRUE(
        contains(error_message([&] { const Wrapped model(two_layers(), options); }), "Inconsistent compute device"));
  });
}

} // namespace
} // namespace fsdp::testing
