// Units within one another and beside one another: of other strategies, sizes and dtypes, with hooks, frozen.

#include <cmath>

#include "engine/bucket.h"
#include "engine/unit.h"
#include "fsdp1/train.h"
#include "fsdp1/two_layers.h"
#include "nn/watched.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

nn::Sequential filled(nn::Sequential layers, double value) {
  torch::NoGradGuard no_grad;
  for (auto& parameter : layers->parameters()) {
    parameter.fill_(value);
  }
  return layers;
}

AutoWrapPolicy linears_with(WrapOverride change) {
  return CustomPolicy([change = std::move(change)](nn::Module& module) -> WrapChoice {
    return dynamic_cast<nn::LinearImpl*>(&module) != nullptr ? WrapChoice(change) : WrapChoice(false);
  });
}

std::vector<at::Tensor> gradients_of(const nn::Module& module) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : module.parameters()) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  return gradients;
}

class Units : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, Units, ::testing::Values(1, 2, 3, 4));

// --- strategies and groups

TEST_P(Units, ThatAreNotShardedGetTheFirstRanksValues) {
  on_threads(GetParam(), [] {
    Wrapped model(two_layers(), {.sharding_strategy = ShardingStrategy::kNoShard, .auto_wrap_policy = linears()});
    StateDict state;
    if (rank() == 0) {
      for (const auto* layer : {"0", "1"}) {
        state.insert(layer + std::string(".weight"), torch::full({4, 4}, 2.0));
        state.insert(layer + std::string(".bias"), torch::full({4}, 2.0));
      }
    }
    load_state_dict(model, state, {.broadcast_from_rank0 = true});
    const auto guard = model.summon_full_params();
    for (const auto& parameter : model->parameters()) {
      EXPECT_TRUE(parameter.equal(torch::full_like(parameter, 2.0)));
    }
  });
}

TEST_P(Units, ThatOneRankHasAloneKeepItsOwnGradient) {
  on_threads(GetParam(), [] {
    for (const bool original : {false, true}) {
      auto layers = filled(two_layers(), 0.5);
      fsdp::detail::wrap_module(*layers[1], {.process_group = group_of_one(), .use_orig_params = original});
      Wrapped model(layers, {.use_orig_params = original});
      model(torch::full({1, 4}, 1.0 + rank())).sum().backward();
      const auto guard = fsdp::summon_full_params(model, {.writeback = false, .with_grads = true});
      const double input = 4 * 0.5 * (1 + rank()) + 0.5;
      EXPECT_TRUE(model->named_parameters()["1.weight"].grad().equal(torch::full({4, 4}, input)));
    }
  });
}

TEST_P(Units, OfOneRankAreReducedOverTheReplicasOfAHybrid) {
  on_threads(GetParam(), [] {
    for (const bool original : {false, true}) {
      FSDPOptions options{.sharding_strategy = ShardingStrategy::kHybridShard, .use_orig_params = original};
      options.process_group = std::pair(group_of_one(), world());
      Wrapped model(two_layers(), options);
      (model[0]->as<nn::Linear>()->bias.sum() * (1 + rank())).backward();
      const auto guard = fsdp::summon_full_params(model, {.writeback = false, .with_grads = true});
      const auto mean = torch::full({4}, (1 + world_size()) / 2.0);
      EXPECT_TRUE(torch::allclose(model->named_parameters()["0.bias"].grad(), mean));
    }
  });
}

TEST_P(Units, MayBeWholeWithinASharded) {
  on_threads(GetParam(), [] {
    FSDPOptions options;
    options.auto_wrap_policy =
        linears_with([](FSDPOptions& changed) { changed.sharding_strategy = ShardingStrategy::kNoShard; });
    Wrapped model(filled(nn::Sequential(nn::Linear(4, 4), nn::LayerNorm(nn::LayerNormOptions({4}))), 0.5), options);
    model(torch::full({1, 4}, 1.0 + rank())).sum().backward();
    const auto norm = model.clip_grad_norm_(1e9);
    for (const auto& of_rank : world()->exchange(std::to_string(norm.item<double>()), {"test", ""})) {
      EXPECT_EQ(of_rank, std::to_string(norm.item<double>()));
    }
    EXPECT_EQ(full_state_dict(model).size(), 4);
  });
}

TEST(UnitsOnAHybridMesh, AreClippedByEachGradientOnce) {
  on_threads(4, [] {
    for (const bool original : {false, true}) {
      FSDPOptions options{.sharding_strategy = ShardingStrategy::kHybridShard, .use_orig_params = original};
      options.device_mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
      Wrapped model(two_layers(), options);
      (model[0]->as<nn::Linear>()->weight.sum() + model[1]->as<nn::Linear>()->bias.sum()).backward();
      EXPECT_FLOAT_EQ(model.clip_grad_norm_(1.0).item<float>(), std::sqrt(20.0F));
    }
  });
}

TEST(UnitsOnAHybridMesh, TakeWhatWasPutOff) {
  for (const bool shown : {false, true}) {
    Trial trial{.make = [] { return subjects::tied(); }, .steps = 3};
    trial.accumulate = Accumulate::kNoAllReduce;
    trial.flat = fsdp::nn::FlatCut{.alignment = 1, .shown_as_one = shown};
    const auto reference = train_unsharded(trial, {.shards = 2, .replicas = 2});
    on_threads(4, [&] {
      Trial mine = trial;
      mine.options.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
      train_wrapped(mine, reference, [&](Subject& subject) {
        for (auto& part : subject.parts) {
          fsdp::nn::make_unit({part.get()}, mine.options, mine.flat);
        }
        FSDPModule root(fsdp::nn::make_unit({subject.module.get()}, mine.options, mine.flat));
        subject.loss = [loss = subject.loss, root, calls = 0](int rank, int step) mutable {
          root.set_requires_all_reduce(++calls % 3 == 0);
          return loss(rank, step);
        };
        return root;
      });
    });
  }
}

TEST_P(Units, AreRootsUntilAnotherIsPutAboveThem) {
  on_threads(GetParam(), [] {
    auto layers = two_layers();
    const auto inner = fsdp::detail::wrap_module(*layers[0], {});
    EXPECT_TRUE(inner.check_is_root());
    const Wrapped model(layers);
    EXPECT_FALSE(inner.check_is_root());
    EXPECT_TRUE(model.check_is_root());
    EXPECT_THROW((void)inner.no_sync(), Error);
    EXPECT_NO_THROW((void)model.no_sync());
  });
}

TEST_P(Units, OfARootWithoutParametersOfItsOwn) {
  on_threads(GetParam(), [] {
    Wrapped model(two_layers(), {.auto_wrap_policy = linears()});
    {
      const auto no_sync = model.no_sync();
      model(torch::ones({1, 4})).sum().backward();
    }
    model(torch::ones({1, 4})).sum().backward();
    EXPECT_GT(model.clip_grad_norm_(1.0).item<double>(), 0);
    EXPECT_EQ(model->parameters().size(), 2);
  });
}

TEST_P(Units, BelowAPlainModuleAreSeveralRoots) {
  on_threads(GetParam(), [] {
    auto layers = nn::Sequential(nn::Linear(4, 4), nn::ReLU(), nn::Linear(4, 4));
    const auto first = fsdp::detail::wrap_module(*layers[0], {});
    fsdp::detail::wrap_module(*layers[1], {});
    fsdp::detail::wrap_module(*layers[2], {});
    EXPECT_EQ(fsdp_modules(layers, /*root_only=*/true).size(), 3);
    {
      const auto guard = fsdp::summon_full_params(layers);
      EXPECT_EQ(layers->parameters().size(), 4);
      const auto nothing_below = fsdp::summon_full_params(*layers[1]);
    }
    {
      const auto no_sync = first.no_sync();
      layers->forward(torch::ones({1, 4})).sum().backward();
    }
    EXPECT_TRUE(layers->named_parameters()["2._flat_param"].grad().defined());
    layers->forward(torch::ones({1, 4})).sum().backward();
    for (const auto& each : fsdp_modules(layers)) {
      EXPECT_GE(each.clip_grad_norm_(1.0).item<float>(), 0);
    }
  });
}

// --- casts

struct NestImpl : nn::Module {
  explicit NestImpl(const FSDPOptions& inner) : fc(nn::Linear(4, 4), inner) {
    register_module("fc", fc);
    embedding = register_module("embedding", nn::Embedding(5, 4));
    table = register_buffer("table", torch::ones({3}));
    count = register_buffer("count", torch::ones({3}, torch::kLong));
    ignored = register_module("ignored", nn::BatchNorm1d(4));
  }
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& x) {
    seen = x.scalar_type();
    return fc(x) + embedding(ids);
  }
  FullyShardedDataParallel<nn::Linear> fc;
  nn::Embedding embedding{nullptr};
  nn::BatchNorm1d ignored{nullptr};
  at::Tensor table, count;
  c10::ScalarType seen{};
};
TORCH_MODULE(Nest);

TEST(UnitsInMixedPrecision, GetInputsOfTheRootAndOfThoseWithinIfTheyAreTold) {
  on_threads(2, [] {
    const auto ids = torch::tensor({1, 2}), x = torch::ones({2, 4});
    const auto options = [](bool root, bool nested) {
      FSDPOptions options;
      options.mixed_precision = {
          .param_dtype = torch::kBFloat16, .cast_forward_inputs = nested, .cast_root_forward_inputs = root};
      return options;
    };
    FullyShardedDataParallel<Nest> casts(Nest(options(true, false)), options(true, false));
    EXPECT_EQ(casts(ids, x).scalar_type(), torch::kBFloat16);
    EXPECT_EQ(casts->seen, torch::kBFloat16);
    FullyShardedDataParallel<Nest> refuses(Nest(options(true, false)), options(false, false));
    EXPECT_THROW(refuses(ids, x), c10::Error);
    auto below = options(false, false);
    below.mixed_precision.param_dtype.reset();
    FullyShardedDataParallel<Nest> nested(Nest(options(true, true)), below);
    EXPECT_EQ(nested(ids, x).scalar_type(), torch::kFloat);
    EXPECT_EQ(nested->seen, torch::kFloat);
  });
}

TEST(UnitsInMixedPrecision, CastNoBufferOfIgnoredModulesAndNoIntegers) {
  on_threads(2, [] {
    Nest nest(FSDPOptions{});
    FSDPOptions options;
    options.mixed_precision.buffer_dtype = torch::kDouble;
    options.ignored_modules = {nest->ignored};
    FullyShardedDataParallel<Nest> model(nest, options);
    model(torch::tensor({1, 2}), torch::ones({2, 4}));
    EXPECT_EQ(model->named_buffers()["table"].scalar_type(), torch::kDouble);
    EXPECT_EQ(model->named_buffers()["count"].scalar_type(), torch::kLong);
    EXPECT_EQ(model->named_buffers()["ignored.running_mean"].scalar_type(), torch::kFloat);
  });
}

TEST(UnitsInMixedPrecision, BeginAtMultiplesOf16BytesOfWhatTheyAreComputedIn) {
  on_threads(2, [] {
    FSDPOptions options{.use_orig_params = true};
    options.mixed_precision.param_dtype = torch::kBFloat16;
    const FullyShardedDataParallel<nn::Linear> model(nn::Linear(5, 7), options);
    const auto& params = model.unit().unit()->params();
    EXPECT_EQ(params[1]->layout().cut().before, 40) << "35, and a gap";
    EXPECT_EQ(params[1]->layout().cut().chunk, 24);
  });
}

// --- hooks

struct HookSetting {
  ShardingStrategy strategy;
  bool original;
};

std::vector<at::Tensor> gradients_with(const HookSetting& setting, const CommHook& hook) {
  Wrapped model(
      filled(nn::Sequential(nn::Linear(5, 3), nn::Linear(3, 7)), 0.5),
      {.sharding_strategy = setting.strategy, .use_orig_params = setting.original});
  if (hook) {
    model.register_comm_hook(hook);
  }
  model(torch::full({1, 5}, 1.0 + rank())).sum().backward();
  return gradients_of(*model);
}

void expect_close(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted, double tolerance) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), wanted[i].defined());
    EXPECT_TRUE(!got[i].defined() || torch::allclose(got[i], wanted[i], tolerance)) << got[i] << wanted[i];
  }
}

TEST_P(Units, GiveTheirHookTheWholeGradientAndZeros) {
  on_threads(GetParam(), [] {
    for (const auto strategy :
         {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard}) {
      for (const bool original : {false, true}) {
        const bool whole = strategy == ShardingStrategy::kNoShard || world_size() == 1;
        const auto mean = whole ? comm_hooks::allreduce_hook(world()) : comm_hooks::reduce_scatter_hook(world());
        int calls = 0;
        const auto got = gradients_with({strategy, original}, [&](const at::Tensor& gradient, at::Tensor& output) {
          ++calls;
          EXPECT_EQ(gradient.numel(), output.numel() * (whole ? 1 : world_size()));
          EXPECT_EQ(gradient.count_nonzero().item<int64_t>(), 46);
          mean(gradient, output);
        });
        EXPECT_EQ(calls, 1);
        expect_close(got, gradients_with({strategy, original}, nullptr), 1e-5);
      }
    }
  });
}

TEST(UnitsOverGloo, ReduceByHooks) {
  on_processes(3, [] {
    init({.backend = "gloo", .device = "cpu"});
    for (const bool original : {false, true}) {
      for (const auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
        const auto wanted = gradients_with({strategy, original}, nullptr);
        const bool whole = strategy == ShardingStrategy::kNoShard;
        const auto mean = whole ? comm_hooks::allreduce_hook(world()) : comm_hooks::reduce_scatter_hook(world());
        expect_close(gradients_with({strategy, original}, mean), wanted, 1e-5);
        for (const auto& hook : {comm_hooks::bf16_compress_hook(world()), comm_hooks::fp16_compress_hook(world())}) {
          expect_close(gradients_with({strategy, original}, hook), wanted, 2e-2);
        }
      }
    }
    shutdown();
  });
}

TEST(Hooks, ThatCompressAreGivenGradientsAsBackwardMadeThem) {
  on_threads(2, [] {
    for (const auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
      const MixedPrecision precision{.reduce_dtype = torch::kBFloat16};
      nn::Sequential layer(nn::Linear(nn::LinearOptions(4, 4).bias(false)));
      Wrapped model(layer, {.sharding_strategy = strategy, .mixed_precision = precision});
      model.register_comm_hook(comm_hooks::fp16_compress_hook(world()));
      const double fits_half_alone = 1 + std::pow(2, -9);
      model(torch::full({1, 4}, fits_half_alone)).sum().backward();
      const at::Tensor gradient = model->parameters()[0].grad();
      EXPECT_EQ(gradient.scalar_type(), torch::kFloat);
      EXPECT_TRUE(gradient.eq(fits_half_alone).all().item<bool>()) << gradient;
    }
  });
}

TEST(Hooks, ThatThrowBreakTheBackwardAndTheModelGoesOn) {
  on_threads(2, [] {
    Wrapped model(two_layers(), {.auto_wrap_policy = linears()});
    bool broken = true;
    model.register_comm_hook(
        [&, mean = comm_hooks::reduce_scatter_hook(world())](const at::Tensor& gradient, at::Tensor& output) {
          if (broken) {
            throw std::runtime_error("no");
          }
          mean(gradient, output);
        });
    EXPECT_THROW(model(torch::ones({1, 4})).sum().backward(), std::runtime_error);
    broken = false;
    model.unit().reset_iter_state();
    model->zero_grad();
    model(torch::ones({1, 4})).sum().backward();
    EXPECT_GT(model.clip_grad_norm_(1.0).item<float>(), 0);
  });
}

// --- sizes and dtypes

struct UnevenImpl : nn::Module {
  UnevenImpl() {
    empty = register_parameter("empty", torch::zeros({0, 4}));
    one = register_parameter("one", torch::ones({1}));
    most = register_parameter("most", torch::arange(37, torch::kFloat));
    last = register_parameter("last", torch::zeros({0}));
  }
  at::Tensor empty, one, most, last;
};

struct NothingImpl : nn::Module {
  NothingImpl() : empty(register_parameter("empty", torch::zeros({0, 4}))) {}
  at::Tensor empty;
};

void train_parameters_without_elements() {
  for (const bool original : {false, true}) {
    const auto uneven = std::make_shared<UnevenImpl>();
    fsdp::detail::wrap_module(*uneven, {.use_orig_params = original});
    (uneven->empty.sum() + (uneven->one * uneven->most).sum() + uneven->last.sum()).backward();
    {
      const auto guard = fsdp::summon_full_params(*uneven, {.writeback = false, .with_grads = true});
      ASSERT_EQ(uneven->parameters().size(), 4);
      EXPECT_TRUE(uneven->named_parameters()["most"].grad().equal(torch::ones({37})));
      EXPECT_TRUE(uneven->named_parameters()["one"].grad().equal(torch::full({1}, 666.0)));
    }
    const auto nothing = std::make_shared<NothingImpl>();
    fsdp::detail::wrap_module(*nothing, {.use_orig_params = original});
    nothing->empty.sum().backward();
    EXPECT_EQ(full_state_dict(nothing).size(), 1);
    const auto guard = fsdp::summon_full_params(nothing);
    EXPECT_EQ(nothing->parameters()[0].sizes(), torch::IntArrayRef({0, 4}));
  }
}

TEST_P(Units, HaveParametersWithoutElements) {
  on_threads(GetParam(), train_parameters_without_elements);
}

TEST(UnitsOverGloo, HaveParametersWithoutElements) {
  on_processes(3, [] {
    init({.backend = "gloo", .device = "cpu"});
    train_parameters_without_elements();
    shutdown();
  });
}

struct TypedImpl : nn::Module {
  explicit TypedImpl(c10::ScalarType dtype) {
    const bool trainable = c10::isFloatingType(dtype) || c10::isComplexType(dtype);
    a = register_parameter("a", (torch::arange(7) + 1).to(dtype), trainable);
    b = register_parameter("b", (torch::arange(4) + 1).to(dtype), trainable);
  }
  at::Tensor a, b;
};

TEST_P(Units, AreOfEveryDtype) {
  on_threads(GetParam(), [] {
    for (const auto dtype :
         {torch::kLong, torch::kByte, torch::kBool, torch::kDouble, torch::kHalf, torch::kComplexDouble}) {
      for (const bool original : {false, true}) {
        SCOPED_TRACE(c10::toString(dtype));
        const auto typed = std::make_shared<TypedImpl>(dtype);
        FSDPOptions options{.use_orig_params = original};
        options.mixed_precision.param_dtype = original ? std::nullopt : std::optional(torch::kBFloat16);
        fsdp::detail::wrap_module(*typed, options);
        EXPECT_TRUE(full_state_dict(typed)["b"].equal((torch::arange(4) + 1).to(dtype)));
        if (!typed->a.requires_grad()) {
          continue;
        }
        const auto loss = (typed->a * typed->a).sum() + typed->b.sum();
        (c10::isComplexType(dtype) ? torch::real(loss) : loss).backward();
        const auto guard = fsdp::summon_full_params(*typed, {.writeback = false, .with_grads = true});
        const auto named = typed->named_parameters();
        EXPECT_TRUE(torch::allclose(named["b"].grad(), torch::ones({4}, dtype)));
        EXPECT_TRUE(torch::allclose(named["a"].grad(), ((torch::arange(7) + 1) * 2).to(dtype)));
      }
    }
  });
}

TEST_P(Units, GoOnInAnotherDtype) {
  on_threads(GetParam(), [] {
    for (const bool original : {false, true}) {
      Wrapped model(two_layers(), {.auto_wrap_policy = linears(), .use_orig_params = original});
      model(torch::ones({1, 4})).sum().backward();
      model->zero_grad();
      for (const auto dtype : {torch::kDouble, torch::kFloat}) {
        model->to(dtype);
        model(torch::ones({1, 4}, dtype)).sum().backward();
        for (const auto& parameter : model->parameters()) {
          EXPECT_EQ(parameter.scalar_type(), dtype);
          EXPECT_TRUE(parameter.numel() == 0 || parameter.grad().scalar_type() == dtype);
        }
        model->zero_grad();
      }
    }
  });
}

// --- frozen

TEST_P(Units, AreFrozenAndThawed) {
  on_threads(GetParam(), [] {
    Wrapped model(two_layers(), {.auto_wrap_policy = linears()});
    auto flat = model->named_parameters()["0._flat_param"];
    for (const bool trainable : {true, false, true}) {
      model->zero_grad();
      flat.set_requires_grad(trainable);
      model(torch::ones({1, 4})).sum().backward();
      EXPECT_EQ(flat.grad().defined(), trainable);
      EXPECT_TRUE(model->named_parameters()["1._flat_param"].grad().defined());
    }
  });
}

TEST_P(Units, AreNotFrozenByAMember) {
  on_threads(GetParam(), [] {
    FullyShardedDataParallel<nn::Linear> model(nn::Linear(4, 4));
    model->bias.set_requires_grad(false);
    EXPECT_TRUE(contains(error_message([&] { model(torch::ones({1, 4})); }), "is part of a flat parameter"));
    model->bias.set_requires_grad(true);
    model(torch::ones({1, 4})).sum().backward();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

TEST(Units, HaveFrozenParametersWithoutGradients) {
  on_threads(2, [] {
    nn::Linear plain(4, 4);
    plain->bias.set_requires_grad(false);
    FullyShardedDataParallel<nn::Linear> model(plain, {.use_orig_params = true});
    model(torch::ones({1, 4})).sum().backward();
    const auto named = model->named_parameters();
    EXPECT_EQ(named["weight"].grad().defined(), named["weight"].numel() > 0);
    EXPECT_FALSE(named["bias"].grad().defined());
    nn::Linear other(4, 4);
    other->bias.set_requires_grad(false);
    FullyShardedDataParallel<nn::Linear> ignoring(other, {.ignored_states = {other->bias}});
    EXPECT_EQ(ignoring->parameters().size(), 2);
  });
}

// --- parts

// So that the optimizers of all ranks write.
TEST_P(Units, GivePartsWithoutElementsGradientsWithoutElements) {
  on_threads(GetParam(), [] {
    FullyShardedDataParallel<nn::Linear> model(nn::Linear(8, 2), {.use_orig_params = true});
    model(torch::ones({1, 8})).sum().backward();
    torch::optim::AdamW optimizer(model->parameters());
    optimizer.step();
    for (const auto& parameter : model->parameters()) {
      ASSERT_TRUE(parameter.grad().defined());
      EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
    }
    EXPECT_EQ(full_optim_state_dict(model, optimizer).state.size(), 2);
    const auto guard = model.summon_full_params({.writeback = false, .with_grads = true});
    for (const auto& parameter : model->parameters()) {
      EXPECT_TRUE(parameter.grad().equal(torch::ones_like(parameter)));
    }
  });
}

TEST_P(Units, HaveWholeGradientsUntilAllRanksForgetThem) {
  on_threads(GetParam(), [] {
    FullyShardedDataParallel<nn::Linear> model(nn::Linear(8, 2), {.use_orig_params = true});
    model(torch::ones({1, 8})).sum().backward();
    for (const bool last : {false, true}) {
      for (auto& parameter : model->parameters()) {
        if (last || rank() == 0) {
          parameter.mutable_grad() = at::Tensor();
        }
      }
      const auto guard = model.summon_full_params({.writeback = false, .with_grads = true});
      const auto& gradient = model->named_parameters()["bias"].grad();
      EXPECT_EQ(gradient.defined(), !last && world_size() > 1);
      EXPECT_TRUE(!gradient.defined() || gradient.equal(torch::ones({2})));
    }
  });
}

// --- one after another

/// What happens in the backward of the third step: with "g1" the gradient of layer 1's output has come.
std::string backward_of_four_layers(std::optional<BackwardPrefetch> prefetch) {
  nn::Sequential layers;
  for (int i = 0; i < 4; ++i) {
    layers->push_back(nn::Linear(4, 4));
  }
  const Wrapped model(layers, {.auto_wrap_policy = linears(), .backward_prefetch = prefetch});
  std::string line;
  auto& runtime = model.unit().unit()->runtime();
  runtime.set_observer([&](const engine::Event& event) { line += text_of(event) + " "; });
  for (int step = 0; step < 3; ++step) {
    auto x = torch::ones({2, 4});
    for (int i = 0; i < 4; ++i) {
      x = layers[i]->as<nn::Linear>()->forward(x);
      x.register_hook([&line, i](const at::Tensor&) { line += "g" + std::to_string(i) + " "; });
    }
    line.clear();
    x.sum().backward();
  }
  runtime.set_observer(nullptr);
  return line;
}

TEST(Units, AreGatheredForBackwardWhenItWasSaid) {
  on_threads(2, [] {
    for (const auto prefetch :
         {std::optional(BackwardPrefetch::kBackwardPre),
          std::optional(BackwardPrefetch::kBackwardPost),
          std::optional<BackwardPrefetch>()}) {
      const auto line = backward_of_four_layers(prefetch);
      const auto gathered = line.find("+1 "), before_is_done = line.find("-2 "), needed = line.find("g1 ");
      ASSERT_TRUE(gathered < line.size() && before_is_done < needed && needed < line.size()) << line;
      EXPECT_EQ(gathered < before_is_done, prefetch == BackwardPrefetch::kBackwardPre) << line;
      EXPECT_EQ(gathered > needed, !prefetch) << line;
    }
  });
}

} // namespace
} // namespace fsdp::testing
