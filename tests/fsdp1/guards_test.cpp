// Guards, what they forbid on all ranks alike, and what goes with a model.

#include "engine/tenant.h"
#include "engine/unit.h"
#include "fsdp1/train.h"
#include "fsdp1/two_layers.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

constexpr std::chrono::seconds kShort(20); // ranks that wait for one another fail soon

class Guards : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, Guards, ::testing::Values(1, 2, 3, 4));

TEST_P(Guards, ForTheFirstRankForbidTheSameOnAllRanks) {
  const auto body = [] {
    Wrapped model(two_layers(), {.auto_wrap_policy = linears()});
    {
      const auto guard = model.summon_full_params({.writeback = false, .rank0_only = true});
      EXPECT_EQ(model->named_parameters().contains("0._flat_param"), rank() != 0);
      EXPECT_EQ(model->named_parameters().contains("0.weight"), rank() == 0);
      EXPECT_TRUE(contains(error_message([&] { (void)model.summon_full_params(); }), "already shown on one rank"));
      EXPECT_TRUE(contains(error_message([&] { full_state_dict(model); }), "are shown whole"));
      EXPECT_TRUE(contains(error_message([&] { (void)model.no_sync(); }), "SUMMON_FULL_PARAMS"));
      EXPECT_TRUE(contains(error_message([&] { model.clip_grad_norm_(1.0); }), "SUMMON_FULL_PARAMS"));
      EXPECT_TRUE(contains(error_message([&] { model.apply([](nn::Module&) {}); }), "SUMMON_FULL_PARAMS"));
    }
    EXPECT_EQ(full_state_dict(model).size(), 4);
    EXPECT_NO_THROW((void)model.no_sync());
    const auto guard = model.summon_full_params();
    EXPECT_EQ(model->parameters().size(), 4);
  };
  on_threads(GetParam(), body, kShort);
}

TEST_P(Guards, OfOneUnitLeaveThoseBelowFlat) {
  on_threads(GetParam(), [] {
    Wrapped model(
        nn::Sequential(nn::Linear(4, 4), nn::LayerNorm(nn::LayerNormOptions({4}))), {.auto_wrap_policy = linears()});
    {
      const auto guard = model.summon_full_params({.recurse = false});
      EXPECT_EQ(model->named_parameters().keys(), (std::vector<std::string>{"0._flat_param", "1.weight", "1.bias"}));
    }
    EXPECT_TRUE(model->named_parameters().contains("_flat_param"));
  });
}

TEST_P(Guards, BetweenAForwardAndItsBackwardChangeNothing) {
  for (const bool use_orig_params : {false, true}) {
    Trial trial{.make = subjects::mlp, .steps = 2, .flat = fsdp::nn::FlatCut{}};
    trial.accumulate = use_orig_params ? Accumulate::kNone : Accumulate::kNoSync; // whole gradients are reduced ones
    const auto reference = train_unsharded(trial, {GetParam()});
    on_threads(GetParam(), [&] {
      train_wrapped(trial, reference, [&](Subject& subject) {
        const auto model = fsdp::detail::wrap_module(
            *subject.module, {.auto_wrap_policy = linears(), .use_orig_params = use_orig_params});
        subject.loss = [model, use_orig_params, module = subject.module, loss = subject.loss](int rank, int step) {
          const auto result = loss(rank, step);
          const auto guard = model.summon_full_params({.with_grads = use_orig_params});
          EXPECT_EQ(module->named_parameters()["0.weight"].sizes(), (std::vector<int64_t>{13, 7}));
          return result;
        };
        return model.unit();
      });
    });
  }
}

TEST_P(Guards, AreRefusedInABackward) {
  on_threads(GetParam(), [] {
    Wrapped model(two_layers());
    std::string said;
    const auto hidden = model[0]->as<nn::Linear>()->forward(torch::ones({1, 4}));
    hidden.register_hook([&](const at::Tensor&) { said = error_message([&] { (void)model.summon_full_params(); }); });
    model[1]->as<nn::Linear>()->forward(hidden).sum().backward();
    EXPECT_TRUE(contains(said, "Cannot manually unshard parameters during forward/backward"));
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

TEST_P(Guards, EndWithExceptions) {
  on_threads(GetParam(), [] {
    Wrapped model(two_layers());
    EXPECT_THROW(model.apply([](nn::Module&) { throw std::runtime_error("no"); }), std::runtime_error);
    EXPECT_TRUE(model->named_parameters().contains("_flat_param"));
    EXPECT_THROW(model(torch::ones({1, 3})), c10::Error);
    EXPECT_NO_THROW((void)model.no_sync());
    model.unit().reset_iter_state();
    model.apply([](nn::Module&) {});
    model(torch::ones({1, 4})).sum().backward();
    EXPECT_GT(model.clip_grad_norm_(1.0).item<float>(), 0);
  });
}

TEST(Guards, OfNoSyncGiveBackWhatUnitsWereTold) {
  on_threads(2, [] {
    Wrapped model(two_layers(), {.auto_wrap_policy = linears()});
    fsdp_modules(model)[1].unit().set_requires_gradient_sync(false);
    {
      const auto outer = model.no_sync();
      { const auto inner = model.no_sync(); }
      EXPECT_FALSE(fsdp_modules(model)[2].unit().unit()->policy.requires_gradient_sync) << "the outer one holds";
    }
    model(torch::ones({1, 4})).sum().backward();
    EXPECT_FALSE(fsdp_modules(model)[1].unit().unit()->policy.requires_gradient_sync);
    EXPECT_TRUE(fsdp_modules(model)[2].unit().unit()->policy.requires_gradient_sync);
    EXPECT_TRUE(model->named_parameters()["1._flat_param"].grad().defined());
  });
}

TEST(Guards, OutliveTheirModel) {
  on_threads(2, [] {
    std::optional<FSDPInstance> instance;
    std::optional<FSDPInstance::NoSync> no_sync;
    std::optional<SummonedParams> guard;
    {
      Wrapped model(two_layers(), {.auto_wrap_policy = linears()});
      instance.emplace(model);
      no_sync.emplace(model.no_sync());
      guard.emplace(model.summon_full_params());
    }
    guard.reset();
    no_sync.reset();
    EXPECT_TRUE(contains(error_message([&] { (void)instance->no_sync(); }), "is gone"));
    EXPECT_TRUE(contains(error_message([&] { (void)instance->check_is_root(); }), "is gone"));
  });
}

TEST(FirstForwards, ThatWereRefusedAreRefusedAgain) {
  on_threads(2, [] {
    FSDPOptions options;
    options.auto_wrap_policy = CustomPolicy([](nn::Module& module) -> WrapChoice {
      if (dynamic_cast<nn::LinearImpl*>(&module) == nullptr) {
        return false;
      }
      return WrapOverride([](FSDPOptions& changed) { changed.use_orig_params = true; });
    });
    Wrapped model(two_layers(), options);
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(contains(error_message([&] { model(torch::ones({1, 4})); }), "Expects one homogeneous value"));
    }
  });
}

// --- what goes with a model

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

TEST(Lifetimes, NothingThatAModelWasGivenOutlivesIt) {
  on_threads(2, [] {
    std::weak_ptr<Group> group;
    std::weak_ptr<int> captured;
    WeakTensor ignored{c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()};
    {
      auto layers = two_layers();
      const auto own = world()->split(0, {"test", ""});
      const auto value = std::make_shared<int>(1);
      const auto bias = layers[0]->as<nn::Linear>()->bias;
      group = own;
      captured = value;
      ignored = WeakTensor(bias.getIntrusivePtr());
      FSDPOptions options{.process_group = own, .ignored_states = {bias}};
      options.param_init_fn = [value, layers](nn::Module&) {};
      Wrapped model(layers, options);
      model(torch::ones({1, 4})).sum().backward();
      barrier();
    }
    EXPECT_TRUE(captured.expired());
    EXPECT_TRUE(ignored.expired());
    EXPECT_TRUE(group.expired());
    barrier();
  });
}

TEST(Lifetimes, AModelWithoutParametersGoes) {
  on_threads(2, [] {
    std::weak_ptr<engine::Unit> unit;
    {
      const FullyShardedDataParallel<nn::ReLU> model{nn::ReLU()};
      unit = model.unit().unit();
      barrier();
      const Wrapped another(two_layers());
      EXPECT_FALSE(unit.expired());
    }
    const Wrapped another(two_layers()); // which looks after those that are gone
    barrier();
    EXPECT_TRUE(unit.expired());
  });
}

TEST(IgnoredModules, MayStayOnTheMetaDevice) {
  on_threads(2, [] {
    auto layers = two_layers();
    for (auto& parameter : layers[1]->parameters()) {
      engine::take_data(parameter, torch::empty_like(parameter, torch::kMeta));
    }
    Wrapped model(layers, {.ignored_modules = {*layers[1]}});
    EXPECT_TRUE(layers[1]->parameters()[0].is_meta());
    EXPECT_EQ(model[0]->parameters().size(), 0);
    EXPECT_EQ(model->parameters().size(), 3);
  });
}

} // namespace
} // namespace fsdp::testing
