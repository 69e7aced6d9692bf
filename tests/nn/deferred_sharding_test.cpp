// Modules whose parameters are recorded when they are sharded.

#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class DeferredSharding : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DeferredSharding, ::testing::Values(1, 2, 3, 4));

Trial deferred(MakeSubject make, FullyShardOptions options = {}) {
  return {.make = std::move(make), .options = std::move(options), .steps = 3, .deferred = true};
}

TEST_P(DeferredSharding, TrainsAsModulesThatHadTheirValues) {
  for (const auto& make : {subjects::mlp, subjects::convolutions, subjects::recurrent, subjects::odd}) {
    expect_parity(deferred([make] { return make(); }), GetParam());
  }
  expect_parity(deferred([] { return subjects::tied(); }), GetParam());
}

TEST_P(DeferredSharding, TrainsInLowPrecisionAndOffloadedToo) {
  const FullyShardOptions options{
      .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat},
      .offload_policy = CPUOffloadPolicy{}};
  expect_parity(deferred([] { return subjects::tied(); }, options), GetParam());
}

TEST_P(DeferredSharding, TrainsFlatUnitsToo) {
  Trial trial = deferred([] { return subjects::tied(); });
  trial.flat = fsdp::nn::FlatCut{.alignment = 1};
  expect_parity(trial, GetParam());
}

TEST(DeferredShardingOnProcesses, TrainsOverGlooToo) {
  on_processes(3, [] {
    const auto trial = deferred([] { return subjects::tied(); });
    const auto reference = train_unsharded(trial, {3});
    init({.backend = "gloo", .device = "cpu"});
    train_sharded(trial, reference);
    shutdown();
  });
}

nn::Sequential two_layers() {
  return nn::Sequential(nn::Linear(4, 6), nn::Linear(6, 3));
}

TEST(DeferredSharding, GivesAUnitsParametersTheirValuesOnly) {
  on_threads(2, [] {
    auto model = deferred_init(two_layers);
    fully_shard(*model[0]);
    EXPECT_FALSE(is_deferred(*model[0]));
    EXPECT_TRUE(is_deferred(*model[1]));
    EXPECT_TRUE(contains(error_message([&] { model->forward(torch::ones({1, 4})); }), "call fully_shard"));
    fully_shard(model);
    EXPECT_FALSE(is_deferred(model));
  });
}

struct BufferedImpl : nn::Module {
  BufferedImpl() {
    linear = register_module("linear", nn::Linear(4, 3));
    mask = register_buffer("mask", torch::rand({3}));
    extra = register_parameter("extra", torch::randn({3}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return linear(x) * mask + extra;
  }
  nn::Linear linear{nullptr};
  at::Tensor mask, extra;
};
TORCH_MODULE(Buffered);

Buffered seeded_buffered() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(5);
  return Buffered();
}

TEST(DeferredSharding, GivesBuffersAndIgnoredParametersTheirValues) {
  on_threads(2, [] {
    auto ordinary = seeded_buffered();
    auto model = deferred_init(seeded_buffered);
    fully_shard(model, {.ignored_params = {model->extra}});
    EXPECT_FALSE(is_deferred(model));
    EXPECT_FALSE(is_sharded(model->extra));
    EXPECT_TRUE(model->mask.equal(ordinary->mask));
    EXPECT_TRUE(model->extra.equal(ordinary->extra));
    EXPECT_TRUE(model(torch::ones({2, 4})).equal(ordinary->forward(torch::ones({2, 4}))));
  });
}

TEST(DeferredSharding, TakesTheFirstRanksValuesWhereTheseAreAskedFor) {
  on_threads(3, [] {
    static std::mutex mutex;
    const auto build = [] {
      const std::lock_guard lock(mutex);
      torch::manual_seed(20 + rank());
      return Buffered();
    };
    const auto seeded = [] {
      const std::lock_guard lock(mutex);
      torch::manual_seed(20);
      return Buffered();
    };
    const auto first = seeded();
    auto model = deferred_init(build);
    fully_shard(model, {.sync_module_states = true});
    EXPECT_TRUE(whole_of(*model, "linear.weight").equal(first->linear->weight));
    EXPECT_TRUE(model->mask.equal(first->mask));
  });
}

TEST(DeferredSharding, IsRefusedBeforeAnythingIsShardedWhereValuesAreGone) {
  on_threads(2, [] {
    const auto outside = torch::zeros({6});
    auto model = deferred_init([&] {
      auto model = two_layers();
      const torch::NoGradGuard no_grad;
      model[0]->as<nn::LinearImpl>()->bias.copy_(outside);
      return model;
    });
    outside.add_(1);
    EXPECT_TRUE(contains(error_message([&] { fully_shard(model); }), "has been written since"));
    EXPECT_FALSE(is_sharded(model->parameters()[0]));
    EXPECT_TRUE(is_deferred(model->parameters()[0]));
  });
}

struct ShardedAsItIsMadeImpl : nn::Module {
  ShardedAsItIsMadeImpl() {
    for (int i = 0; i < 3; ++i) {
      nn::Linear layer(4, 4);
      fully_shard(*layer);
      {
        const torch::NoGradGuard no_grad;
        layer->bias.fill_(i); // a handle
        layer->parameters()[0].normal_(); // a shard
      }
      layers->push_back(layer);
    }
    register_module("layers", layers);
    register_parameter("scale", torch::ones({4}));
  }
  nn::ModuleList layers;
};
TORCH_MODULE(ShardedAsItIsMade);

TEST(DeferredSharding, WorksWithinTheConstruction) {
  on_processes(2, [] {
    init({.device = "cpu"});
    torch::manual_seed(3);
    const auto ordinary = ShardedAsItIsMade();
    torch::manual_seed(3);
    const auto model = deferred_init([] { return ShardedAsItIsMade(); });
    EXPECT_TRUE(is_deferred(model));
    EXPECT_FALSE(is_deferred(*model->layers));
    for (const auto& item : ordinary->layers->named_parameters()) {
      EXPECT_TRUE(whole_of(*model->layers, item.key()).equal(whole_of(*ordinary->layers, item.key()))) << item.key();
    }
    shutdown();
  });
}

TEST(DeferredSharding, WarnsOfOtherSeeds) {
  on_processes(2, [] {
    init({.device = "cpu"});
    ::testing::internal::CaptureStderr();
    for (const bool other : {false, true}) {
      torch::manual_seed(other ? rank() : 1);
      auto model = deferred_init(two_layers);
      fully_shard(model);
      barrier();
    }
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(said.find("give '0.weight' different values") != std::string::npos, rank() == 0) << said;
    shutdown();
  });
}

} // namespace
} // namespace fsdp::testing
