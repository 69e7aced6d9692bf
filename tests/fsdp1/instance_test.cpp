// FullyShardedDataParallel: each argument and method, and what is said of mistakes.

#include "fsdp1/train.h"
#include "fsdp1/two_layers.h"
#include "support/error_message.h"
#include "support/scoped_environment.h"

namespace fsdp::testing {
namespace {

FSDPModule wrap_subject(Subject& subject, FSDPOptions options) {
  options.auto_wrap_policy = ModuleWrapPolicy::of<subjects::Block>();
  return fsdp::detail::wrap_module(*subject.module, options).unit();
}

struct Setting {
  ShardingStrategy strategy;
  bool original;
  bool accumulates;
};

FSDPOptions options_of(const Setting& setting) {
  FSDPOptions options;
  options.sharding_strategy = setting.strategy;
  options.use_orig_params = setting.original;
  return options;
}

std::vector<Setting> plain_settings() {
  std::vector<Setting> settings;
  for (const auto strategy :
       {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard}) {
    for (const bool original : {false, true}) {
      for (const bool accumulates : {false, true}) {
        settings.push_back({strategy, original, accumulates});
      }
    }
  }
  return settings;
}

Trial trial_for(const Setting& setting) {
  Trial trial{.make = [] { return subjects::tied(); }, .steps = 3};
  trial.accumulate = setting.accumulates ? Accumulate::kNoSync : Accumulate::kNone;
  trial.flat = nn::FlatCut{}; // a gradient for all parameters of a unit, or for none
  return trial;
}

class Instances : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, Instances, ::testing::Values(1, 2, 3, 4));

TEST_P(Instances, TrainAsUnshardedWithEveryStrategy) {
  for (const auto& setting : plain_settings()) {
    SCOPED_TRACE(::testing::Message() << static_cast<int>(setting.strategy) << setting.original << setting.accumulates);
    const Trial trial = trial_for(setting);
    const bool whole = setting.strategy == ShardingStrategy::kNoShard;
    const Arrangement arrangement = whole ? Arrangement{.shards = 1, .replicas = GetParam()} : Arrangement{GetParam()};
    const auto reference = train_unsharded(trial, arrangement);
    on_threads(GetParam(), [&] {
      train_wrapped(trial, reference, [&](Subject& subject) { return wrap_subject(subject, options_of(setting)); });
    });
  }
}

TEST(InstancesOnAHybridMesh, TrainAsUnsharded) {
  for (const auto strategy : {ShardingStrategy::kHybridShard, ShardingStrategy::kHybridShardZero2}) {
    for (const bool original : {false, true}) {
      const Setting setting{strategy, original, false};
      const Trial trial = trial_for(setting);
      const auto reference = train_unsharded(trial, {.shards = 2, .replicas = 2});
      on_threads(4, [&] {
        FSDPOptions options = options_of(setting);
        options.device_mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
        train_wrapped(trial, reference, [&](Subject& subject) { return wrap_subject(subject, options); });
      });
    }
  }
}

TEST(Instance, BackwardPrefetchSaysWhenTheNextUnitIsGathered) {
  const Trial trial = trial_for({});
  const auto reference = train_unsharded(trial, {.shards = 2});
  for (const auto prefetch :
       {std::optional(BackwardPrefetch::kBackwardPre),
        std::optional(BackwardPrefetch::kBackwardPost),
        std::optional<BackwardPrefetch>()}) {
    on_threads(2, [&] {
      FSDPOptions options;
      options.backward_prefetch = prefetch;
      train_wrapped(trial, reference, [&](Subject& subject) { return wrap_subject(subject, options); });
    });
  }
}

TEST(Instance, AreWhatTheyHold) {
  on_threads(2, [] {
    Wrapped model(two_layers(), {.auto_wrap_policy = linears()});
    EXPECT_EQ(model->size(), 2);
    EXPECT_EQ(model.module().ptr(), model.ptr());
    EXPECT_EQ(model(torch::ones({1, 4})).sizes(), torch::IntArrayRef({1, 4}));
    EXPECT_EQ(fsdp_modules(model).size(), 3);
    EXPECT_EQ(fsdp_modules(model, /*root_only=*/true).size(), 1);
    EXPECT_TRUE(model.check_is_root());
    EXPECT_FALSE(fsdp_modules(model)[1].check_is_root());
    const torch::nn::Sequential holder = model;
    EXPECT_EQ(holder->parameters().size(), 2);
  });
}

TEST(Instance, OfOneRankAreNotSharded) {
  on_threads(1, [] {
    Wrapped model(two_layers());
    EXPECT_EQ(model.sharding_strategy(), ShardingStrategy::kNoShard);
  });
}

TEST(Instance, OfModulesWithoutParametersPassOn) {
  on_threads(2, [] {
    FullyShardedDataParallel<torch::nn::ReLU> model{torch::nn::ReLU()};
    EXPECT_EQ(model->parameters().size(), 0);
    EXPECT_TRUE(model(torch::ones({2})).equal(torch::ones({2})));
  });
}

TEST(Instance, ThatAreWrappedAgainStayTheSame) {
  on_threads(2, [] {
    Wrapped model(two_layers());
    const auto before = model(torch::ones({1, 4})).detach().clone();
    Wrapped again(model);
    EXPECT_TRUE(again(torch::ones({1, 4})).equal(before));
    EXPECT_EQ(fsdp_modules(again).size(), 1);
  });
}

TEST(Instance, GetTheFirstRanksValues) {
  on_threads(2, [] {
    auto layers = two_layers();
    {
      torch::NoGradGuard no_grad;
      for (auto& parameter : layers->parameters()) {
        parameter.fill_(1 + rank());
      }
    }
    Wrapped model(layers, {.sync_module_states = true});
    const auto guard = model.summon_full_params();
    for (const auto& parameter : model->parameters()) {
      EXPECT_TRUE(parameter.equal(torch::ones_like(parameter)));
    }
  });
}

TEST(Instance, LeaveBuffersToWrappersAmongOtherRanks) {
  on_threads(2, [] {
    torch::nn::BatchNorm1d own(4), common(4);
    own->running_mean.fill_(rank());
    common->running_mean.fill_(rank());
    const FullyShardedDataParallel<torch::nn::BatchNorm1d> alone(
        own, {.process_group = group_of_one(), .sync_module_states = true});
    const Wrapped all(
        torch::nn::Sequential(torch::nn::Linear(4, 4), own, common), FSDPOptions{.sync_module_states = true});
    EXPECT_TRUE(own->running_mean.eq(rank()).all().item<bool>());
    EXPECT_TRUE(common->running_mean.eq(0).all().item<bool>());
  });
}

TEST(Instance, LeaveIgnoredModulesAndStatesAlone) {
  on_threads(2, [] {
    auto layers = two_layers();
    Wrapped model(layers, {.auto_wrap_policy = linears(), .ignored_modules = {*layers[1]}});
    EXPECT_EQ(fsdp_modules(model).size(), 2);
    EXPECT_EQ(layers[1]->as<torch::nn::Linear>()->parameters()[0].sizes(), torch::IntArrayRef({4, 4}));
    auto others = two_layers();
    const auto weight = others[0]->as<torch::nn::Linear>()->weight;
    Wrapped second(others, {.ignored_states = {weight}});
    EXPECT_TRUE(others->named_parameters().contains("0.weight"));
    EXPECT_EQ(second->parameters().size(), 2);
  });
}

TEST(Instance, AreMadeByWrapWhereItIsEnabled) {
  on_threads(2, [] {
    const auto plain = wrap(torch::nn::Linear(4, 4));
    EXPECT_FALSE(is_fsdp(plain));
    const auto enabled = enable_wrap({.use_orig_params = false});
    const auto flat = wrap(torch::nn::Linear(4, 4));
    EXPECT_EQ(flat->parameters().size(), 1);
    const auto original = wrap(torch::nn::Linear(4, 4), [](FSDPOptions& options) { options.use_orig_params = true; });
    EXPECT_EQ(original->parameters().size(), 2);
  });
}

TEST(Instance, ComputeInTheDtypeThatMixedPrecisionSays) {
  on_threads(2, [] {
    for (const bool keep : {false, true}) {
      FSDPOptions options;
      options.mixed_precision = {.param_dtype = torch::kBFloat16, .keep_low_precision_grads = keep};
      Wrapped model(two_layers(), options);
      const auto output = model(torch::ones({1, 4}));
      EXPECT_EQ(output.scalar_type(), torch::kBFloat16);
      output.sum().backward();
      const auto flat = model->parameters()[0];
      EXPECT_EQ(flat.scalar_type(), torch::kFloat);
      EXPECT_EQ(flat.grad().scalar_type(), keep ? torch::kBFloat16 : torch::kFloat);
      EXPECT_EQ(model.clip_grad_norm_(1.0).scalar_type(), flat.grad().scalar_type());
      const auto guard = model.summon_full_params();
      EXPECT_EQ(model->parameters()[0].scalar_type(), torch::kFloat);
    }
  });
}

TEST(Instance, RefuseInputsOfAnotherDtypeWhereNothingCastsThem) {
  on_threads(2, [] {
    FSDPOptions options;
    options.mixed_precision = {.param_dtype = torch::kBFloat16, .cast_root_forward_inputs = false};
    Wrapped model(two_layers(), options);
    EXPECT_THROW(model(torch::ones({1, 4})), c10::Error);
  });
}

TEST(Instance, CastBuffersAtTheFirstForwardAndKeepBatchNormInFullPrecision) {
  on_threads(2, [] {
    FSDPOptions options;
    options.auto_wrap_policy = linears();
    options.mixed_precision = {.param_dtype = torch::kBFloat16, .buffer_dtype = torch::kBFloat16};
    Wrapped model(torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4)), options);
    EXPECT_EQ(fsdp_modules(model).size(), 3);
    model(torch::ones({3, 4})).sum().backward();
    EXPECT_EQ(model[1]->named_buffers()["running_mean"].scalar_type(), torch::kFloat);
    model[1]->to(torch::kCPU);
    const auto norm = model[1]->as<torch::nn::BatchNorm1d>();
    EXPECT_EQ(norm->weight.scalar_type(), torch::kFloat);
    options.auto_wrap_policy.reset();
    Wrapped cast(torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4)), options);
    EXPECT_EQ(cast[1]->named_buffers()["running_mean"].scalar_type(), torch::kFloat);
    cast(torch::ones({3, 4}));
    EXPECT_EQ(cast[1]->named_buffers()["running_mean"].scalar_type(), torch::kBFloat16);
  });
}

class FullPrecisionInEvaluation : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, FullPrecisionInEvaluation, ::testing::Values(1, 2, 3, 4));

torch::nn::Sequential normed_layers() {
  static std::mutex mutex; // ranks that are threads share one random number generator
  const std::lock_guard lock(mutex);
  torch::manual_seed(5);
  return torch::nn::Sequential(torch::nn::Linear(4, 5), torch::nn::BatchNorm1d(5), torch::nn::Linear(5, 3));
}

TEST_P(FullPrecisionInEvaluation, IsWhatTheEnvironmentAskedFor) {
  const ScopedEnvironment environment(std::map<std::string, std::string>{{"FSDP_USE_FULL_PREC_IN_EVAL", "1"}});
  on_threads(GetParam(), [] {
    for (const auto& setting : plain_settings()) {
      FSDPOptions options = options_of(setting);
      options.mixed_precision = {
          .param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat, .buffer_dtype = torch::kBFloat16};
      auto layers = normed_layers();
      Wrapped model(normed_layers(), options), never_evaluated(normed_layers(), options);
      torch::optim::SGD optimizer(model->parameters(), 0.1), other(never_evaluated->parameters(), 0.1);
      const auto x = subjects::data(rank(), 0, {6, 4});
      layers->eval();
      model->eval();
      for (int step = 0; step < 2; ++step) {
        if (step == 0) { // afterwards the weights are others
          const auto evaluated = model(x);
          EXPECT_EQ(evaluated.scalar_type(), torch::kFloat);
          EXPECT_TRUE(evaluated.equal(layers->forward(x)));
        }
        EXPECT_EQ(model(x).scalar_type(), torch::kFloat);
        model->train();
        const auto trained = model(x), expected = never_evaluated(x);
        EXPECT_EQ(trained.scalar_type(), torch::kBFloat16);
        EXPECT_TRUE(trained.equal(expected));
        trained.sum().backward();
        expected.sum().backward();
        optimizer.step();
        other.step();
        model->eval();
      }
      model(x);
      EXPECT_EQ(model[1]->named_buffers()["running_mean"].scalar_type(), torch::kFloat);
      const auto state = full_state_dict(model), wanted = full_state_dict(never_evaluated);
      EXPECT_TRUE(state["0.weight"].equal(wanted["0.weight"]));
    }
  });
}

TEST_P(FullPrecisionInEvaluation, MayBeginWhereWholeParametersAreShown) {
  const ScopedEnvironment environment(std::map<std::string, std::string>{{"FSDP_USE_FULL_PREC_IN_EVAL", "1"}});
  on_threads(GetParam(), [] {
    for (const auto& setting : plain_settings()) {
      FSDPOptions options = options_of(setting);
      options.mixed_precision.param_dtype = torch::kBFloat16;
      auto layers = normed_layers();
      Wrapped model(normed_layers(), options);
      const auto x = subjects::data(rank(), 0, {6, 4});
      const auto fill = [](torch::nn::Module& module, double value) {
        const torch::NoGradGuard no_grad;
        for (auto& parameter : module.parameters()) {
          parameter.fill_(value);
        }
      };
      {
        const auto guard = model.summon_full_params();
        fill(*model, 0.1);
        fill(*layers, 0.1);
        model->eval();
        layers->eval();
        EXPECT_TRUE(model(x).equal(layers->forward(x)));
        fill(*model, 0.3);
      }
      fill(*layers, 0.3);
      const auto evaluated = model(x);
      EXPECT_EQ(evaluated.scalar_type(), torch::kFloat);
      EXPECT_TRUE(evaluated.equal(layers->forward(x)));
    }
  });
}

TEST(FullPrecisionInEvaluationErrors, AreBackwardsThroughWhatWasRecordedBefore) {
  const ScopedEnvironment environment(std::map<std::string, std::string>{{"FSDP_USE_FULL_PREC_IN_EVAL", "1"}});
  on_threads(2, [] {
    FSDPOptions options;
    options.mixed_precision.param_dtype = torch::kBFloat16;
    Wrapped model(two_layers(), options);
    auto loss = model(torch::ones({1, 4})).sum();
    model->eval();
    EXPECT_EQ(model(torch::ones({1, 4})).scalar_type(), torch::kFloat);
    EXPECT_THROW(loss.backward(), c10::Error) << "values that it saved are no more";
  });
}

TEST(Instance, OfModulesOnTheMetaDeviceGetValuesByAFunction) {
  on_threads(2, [] {
    const auto on_meta = [] {
      auto layers = two_layers();
      for (auto& parameter : layers->parameters()) {
        engine::take_data(parameter, torch::empty_like(parameter, torch::kMeta));
      }
      return layers;
    };
    EXPECT_TRUE(contains(error_message([&] { Wrapped model(on_meta()); }), "give param_init_fn"));
    FSDPOptions options;
    options.auto_wrap_policy = linears();
    options.param_init_fn = [](torch::nn::Module& module) {
      for (auto& parameter : module.parameters(/*recurse=*/false)) {
        engine::take_data(parameter, torch::full(parameter.sizes(), 2.0));
      }
    };
    Wrapped model(on_meta(), options);
    const auto guard = model.summon_full_params();
    for (const auto& parameter : model->parameters()) {
      EXPECT_TRUE(parameter.equal(torch::full_like(parameter, 2.0)));
    }
  });
}

TEST(Instance, ApplyAFunctionToWholeParameters) {
  on_threads(2, [] {
    Wrapped model(two_layers(), {.auto_wrap_policy = linears()});
    model.apply([](torch::nn::Module& module) {
      torch::NoGradGuard no_grad;
      for (auto& parameter : module.parameters(/*recurse=*/false)) {
        EXPECT_NE(parameter.dim(), 0);
        EXPECT_EQ(parameter.sizes().back(), 4);
        parameter.fill_(5);
      }
    });
    {
      torch::NoGradGuard no_grad;
      EXPECT_TRUE(model(torch::ones({1, 4})).equal(torch::full({1, 4}, (4 * 5 + 5) * 5 * 4 + 5.0)));
    }
    const auto guard = model.summon_full_params();
    EXPECT_TRUE(contains(error_message([&] { model.apply([](torch::nn::Module&) {}); }), "expected to be in states"));
  });
}

TEST(Instance, ReduceByAHook) {
  for (const auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
    on_threads(2, [&] {
      const auto gradient_with = [&](const CommHook& hook) {
        torch::manual_seed(1);
        auto layers = two_layers();
        torch::NoGradGuard no_grad;
        for (auto& parameter : layers->parameters()) {
          parameter.fill_(0.5);
        }
        Wrapped model(layers, {.sharding_strategy = strategy});
        if (hook) {
          model.register_comm_hook(hook);
        }
        torch::AutoGradMode grad(true);
        model(torch::full({1, 4}, 1.0 + rank())).sum().backward();
        return model->parameters()[0].grad().clone();
      };
      const auto wanted = gradient_with(nullptr);
      const auto whole = strategy == ShardingStrategy::kNoShard;
      const auto group = world();
      EXPECT_TRUE(gradient_with(whole ? comm_hooks::allreduce_hook(group) : comm_hooks::reduce_scatter_hook(group))
                      .equal(wanted));
      EXPECT_TRUE(gradient_with(comm_hooks::bf16_compress_hook(group)).allclose(wanted, 1e-2));
      EXPECT_TRUE(gradient_with(comm_hooks::fp16_compress_hook(group)).allclose(wanted, 1e-2));
      int calls = 0;
      const auto own = gradient_with([&calls](const at::Tensor& gradient, at::Tensor& output) {
        ++calls;
        EXPECT_EQ(gradient.numel() % 2, 0);
        output.fill_(7);
      });
      EXPECT_EQ(calls, 1);
      EXPECT_TRUE(own.equal(torch::full_like(own, 7)));
    });
  }
}

TEST(InstanceErrors, OfCallsThatAreForTheRoot) {
  on_threads(2, [] {
    Wrapped model(two_layers(), {.auto_wrap_policy = linears()});
    const auto inner = fsdp_modules(model)[1];
    EXPECT_TRUE(contains(error_message([&] { inner.clip_grad_norm_(1.0); }), "should only be called on the root"));
    EXPECT_TRUE(contains(error_message([&] { (void)inner.no_sync(); }), "should only be called on the root"));
    EXPECT_TRUE(
        contains(error_message([&] { inner.register_comm_hook(comm_hooks::allreduce_hook(world())); }), "on the root"));
    model.register_comm_hook(comm_hooks::reduce_scatter_hook(world()));
    EXPECT_TRUE(contains(
        error_message([&] { model.register_comm_hook(comm_hooks::reduce_scatter_hook(world())); }),
        "A communication hook is already registered"));
  });
}

TEST(InstanceErrors, OfHybridStrategies) {
  on_threads(2, [] {
    const auto make = [](FSDPOptions options) {
      options.sharding_strategy = ShardingStrategy::kHybridShard;
      return error_message([&] { Wrapped model(two_layers(), options); });
    };
    EXPECT_TRUE(contains(make({}), "requires explicit specification of process group or device_mesh"));
    EXPECT_TRUE(contains(make({.process_group = world()}), "Expected process_group to be passed in"));
    EXPECT_TRUE(contains(make({.device_mesh = default_mesh()}), "a mesh of two dimensions"));
    Wrapped hybrid(
        two_layers(),
        {.process_group = std::pair(world(), group_of_one()), .sharding_strategy = ShardingStrategy::kHybridShard});
    EXPECT_TRUE(contains(
        error_message([&] { hybrid.register_comm_hook(comm_hooks::allreduce_hook(world())); }),
        "not supported for hybrid strategies"));
    EXPECT_TRUE(contains(
        error_message([&] { Wrapped model(two_layers(), {.process_group = world(), .device_mesh = default_mesh()}); }),
        "Cannot pass both"));
  });
}

TEST(InstanceErrors, OfFrozenParametersBesideOthers) {
  on_threads(2, [] {
    const auto half_frozen = [] {
      auto layers = two_layers();
      layers[0]->as<torch::nn::Linear>()->bias.set_requires_grad(false);
      return layers;
    };
    EXPECT_TRUE(contains(
        error_message([&] { Wrapped model(half_frozen()); }), "has both parameters with requires_grad=True and False"));
    Wrapped model(half_frozen(), {.use_orig_params = true});
    EXPECT_FALSE(model->named_parameters()["0.bias"].requires_grad());
    EXPECT_TRUE(model->named_parameters()["0.weight"].requires_grad());
  });
}

TEST(InstanceErrors, OfUnitsThatDoNotAgree) {
  on_threads(2, [] {
    FSDPOptions options;
    options.auto_wrap_policy = CustomPolicy([](torch::nn::Module& module) -> WrapChoice {
      if (dynamic_cast<torch::nn::LinearImpl*>(&module) == nullptr) {
        return false;
      }
      return WrapOverride([](FSDPOptions& changed) { changed.use_orig_params = true; });
    });
    Wrapped model(two_layers(), options);
    EXPECT_TRUE(contains(
        error_message([&] {
          model(torch::ones({1, 4}));
        }),
        "Expects one homogeneous value for use_orig_params"));
  });
}

TEST(InstanceErrors, OfIgnoredStates) {
  on_threads(2, [] {
    auto layers = two_layers();
    EXPECT_TRUE(contains(
        error_message([&] {
          Wrapped model(layers, {.ignored_modules = {*layers[0]}, .ignored_states = {layers->parameters()[0]}});
        }),
        "Cannot pass both ignored_modules and ignored_states"));
    fsdp::detail::wrap_module(*layers[0], {});
    EXPECT_TRUE(contains(
        error_message([&] { Wrapped model(layers, {.ignored_modules = {*layers[0]}}); }),
        "should not include FSDP modules"));
    EXPECT_TRUE(contains(error_message([&] { Wrapped model(layers, {.auto_wrap_policy = linears()}); }), "already"));
  });
}

TEST(InstanceErrors, OfSummonFullParams) {
  on_threads(2, [] {
    Wrapped flat(two_layers());
    EXPECT_TRUE(
        contains(error_message([&] { (void)flat.summon_full_params({.with_grads = true}); }), "use_orig_params"));
    EXPECT_TRUE(
        contains(error_message([&] { (void)flat.summon_full_params({.rank0_only = true}); }), "writeback = false"));
    Wrapped original(two_layers(), {.use_orig_params = true});
    EXPECT_TRUE(contains(
        error_message([&] { (void)original.summon_full_params({.offload_to_cpu = true, .with_grads = true}); }),
        "is not supported"));
    Wrapped whole(two_layers(), {.sharding_strategy = ShardingStrategy::kNoShard});
    EXPECT_TRUE(
        contains(error_message([&] { (void)whole.summon_full_params({.offload_to_cpu = true}); }), "is not supported"));
  });
}

struct SummonsImpl : torch::nn::Module {
  SummonsImpl() : fc(register_module("fc", torch::nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    inside();
    return fc(x);
  }
  torch::nn::Linear fc;
  std::function<void()> inside;
};
TORCH_MODULE(Summons);

TEST(InstanceErrors, OfCallsInTheMiddleOfAForward) {
  on_threads(2, [] {
    FullyShardedDataParallel<Summons> model{Summons()};
    std::vector<std::string> said;
    model->inside = [&] {
      said.push_back(error_message([&] { (void)model.summon_full_params(); }));
      said.push_back(error_message([&] { model.clip_grad_norm_(1.0); }));
      said.push_back(error_message([&] { (void)model.no_sync(); }));
    };
    model(torch::ones({1, 4})).sum().backward();
    EXPECT_TRUE(contains(said.at(0), "Cannot manually unshard parameters during forward/backward"));
    EXPECT_TRUE(contains(said.at(1), "expected to be in states [IDLE] but current state is FORWARD_BACKWARD"));
    EXPECT_TRUE(contains(said.at(2), "expected to be in states"));
  });
}

TEST(InstanceErrors, OfClones) {
  on_threads(2, [] {
    for (const bool original : {false, true}) {
      FullyShardedDataParallel<torch::nn::Linear> model(torch::nn::Linear(4, 4), {.use_orig_params = original});
      EXPECT_TRUE(contains(
          error_message([&] { clone(model, [] { return torch::nn::Linear(4, 4); }); }),
          "is part of a flat parameter, of which no copies are made"));
      EXPECT_EQ(model(torch::ones({1, 4})).numel(), 4);
    }
  });
}

TEST(Instance, ClipReturnsZeroWithoutGradients) {
  on_threads(2, [] {
    Wrapped model(two_layers());
    const auto norm = model.clip_grad_norm_(1.0);
    EXPECT_EQ(norm.item<float>(), 0);
    EXPECT_EQ(norm.scalar_type(), torch::kFloat);
  });
}

} // namespace
} // namespace fsdp::testing
