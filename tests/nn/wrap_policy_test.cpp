// Which modules a policy chooses. The lists are those of PyTorch's policies, run on modules of the same shapes.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/describe.h>
#include <fsdp/fully_shard.h>
#include <fsdp/wrap.h>

#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;
using Paths = std::vector<std::string>;

struct BlockImpl : nn::Module {
  BlockImpl() {
    register_module("norm", nn::LayerNorm(nn::LayerNormOptions({8})));
    register_module("attention", nn::MultiheadAttention(8, 2));
    register_module("mlp", nn::Sequential(nn::Linear(8, 32), nn::ReLU(), nn::Linear(32, 8)));
  }
};
TORCH_MODULE(Block);

struct SpecialBlockImpl : BlockImpl {};

struct TransformerImpl : nn::Module {
  TransformerImpl() {
    nn::ModuleList blocks;
    blocks->push_back(Block());
    blocks->push_back(std::make_shared<SpecialBlockImpl>());
    nn::ModuleDict heads;
    heads->update({{"a", nn::Linear(8, 8).ptr()}, {"b", nn::Linear(8, 16).ptr()}});
    register_module("embedding", nn::Embedding(16, 8));
    register_module("blocks", blocks);
    register_module("heads", heads);
    register_module("batch_norm", nn::BatchNorm1d(8));
    register_module("norm", nn::LayerNorm(nn::LayerNormOptions({8})));
  }
};
TORCH_MODULE(Transformer);

// Torch's Sequential takes no other one.
struct LayersImpl : nn::Module {
  explicit LayersImpl(const std::vector<std::shared_ptr<nn::Module>>& layers) {
    for (const auto& layer : layers) {
      register_module(std::to_string(children().size()), layer);
    }
  }
};

std::shared_ptr<nn::Module> layers(const std::vector<std::shared_ptr<nn::Module>>& each) {
  return std::make_shared<LayersImpl>(each);
}

std::shared_ptr<nn::Module> linear() {
  return nn::Linear(5, 5).ptr();
}

std::shared_ptr<nn::Module> nested() {
  return layers({linear(), linear(), layers({linear(), linear()})});
}

Paths paths_of(const std::vector<ModuleToWrap>& modules) {
  Paths paths;
  for (const auto& each : modules) {
    paths.push_back(each.path);
  }
  return paths;
}

Paths chosen(ModuleRef model, const AutoWrapPolicy& policy, const IgnoredStates& ignored = {}) {
  return paths_of(modules_to_wrap(model, policy, ignored));
}

Paths chosen(const AutoWrapPolicy& policy) {
  return chosen(Transformer(), policy);
}

nn::Module& below(const nn::Module& module, const std::string& path) {
  for (const auto& item : module.named_modules()) {
    if (item.key() == path) {
      return *item.value();
    }
  }
  throw std::runtime_error("no module " + path);
}

template <typename Class>
bool is(const nn::Module& module) {
  return dynamic_cast<const Class*>(&module) != nullptr;
}

// clang-format off
const Paths kAll{
    "embedding",
    "blocks.0.norm", "blocks.0.attention.out_proj", "blocks.0.attention",
    "blocks.0.mlp.0", "blocks.0.mlp.1", "blocks.0.mlp.2", "blocks.0.mlp", "blocks.0",
    "blocks.1.norm", "blocks.1.attention.out_proj", "blocks.1.attention",
    "blocks.1.mlp.0", "blocks.1.mlp.1", "blocks.1.mlp.2", "blocks.1.mlp", "blocks.1",
    "blocks", "heads.a", "heads.b", "heads", "batch_norm", "norm"};
const Paths kBlocksAndLinears{
    "blocks.0.attention.out_proj", "blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.0",
    "blocks.1.attention.out_proj", "blocks.1.mlp.0", "blocks.1.mlp.2", "blocks.1",
    "heads.a", "heads.b"};
// clang-format on

TEST(WrapPolicy, AlwaysChoosesAllButTheRootChildrenFirst) {
  EXPECT_EQ(chosen(nested(), always_wrap_policy), (Paths{"0", "1", "2.0", "2.1", "2"}));
  EXPECT_EQ(chosen(always_wrap_policy), kAll);
}

TEST(WrapPolicy, SizeCountsWhatIsInNoUnitYet) {
  const auto by_size = [](int64_t size) { return size_based_auto_wrap_policy({.min_num_params = size}); };
  EXPECT_EQ(chosen(nested(), by_size(0)), (Paths{"0", "1", "2.0", "2.1", "2"}));
  EXPECT_EQ(chosen(nested(), by_size(30)), (Paths{"0", "1", "2.0", "2.1"}));
  EXPECT_EQ(chosen(nested(), by_size(40)), (Paths{"2"}));
  EXPECT_EQ(chosen(nested(), by_size(60)), (Paths{"2"}));
  EXPECT_EQ(chosen(nested(), by_size(61)), (Paths{}));
  EXPECT_EQ(
      chosen(by_size(137)),
      (Paths{
          "blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.0", "blocks.1.mlp.0", "blocks.1.mlp.2", "blocks.1", "heads.b"}));
  EXPECT_EQ(chosen(by_size(288)), (Paths{"blocks.0.mlp.0", "blocks.0", "blocks.1.mlp.0", "blocks.1"}));
  EXPECT_EQ(chosen(by_size(289)), (Paths{"blocks.0.mlp", "blocks.0", "blocks.1.mlp", "blocks.1"}));
  EXPECT_EQ(chosen(by_size(700)), (Paths{"blocks.0", "blocks.1"}));
  EXPECT_EQ(chosen(by_size(1000)), (Paths{}));
  EXPECT_EQ(chosen(size_based_auto_wrap_policy()), (Paths{}));
}

TEST(WrapPolicy, SizeHasForcedLeavesAndExcludedClasses) {
  EXPECT_EQ(
      chosen(size_based_auto_wrap_policy({.min_num_params = 100, .force_leaf_modules = {}})),
      (Paths{
          "embedding",
          "blocks.0.attention",
          "blocks.0.mlp.0",
          "blocks.0.mlp.2",
          "blocks.1.attention",
          "blocks.1.mlp.0",
          "blocks.1.mlp.2",
          "heads.b"}));
  EXPECT_EQ(
      chosen(size_based_auto_wrap_policy({.min_num_params = 1, .force_leaf_modules = ModuleClasses::of<Block>()})),
      (Paths{"embedding", "heads.a", "heads.b", "batch_norm", "norm"}));
  EXPECT_EQ(
      chosen(size_based_auto_wrap_policy(
          {.min_num_params = 40, .exclude_wrap_modules = ModuleClasses::of<nn::Linear, nn::ModuleList>()})),
      (Paths{"embedding", "blocks.0.mlp", "blocks.0", "blocks.1.mlp", "blocks.1", "heads"}));
}

TEST(WrapPolicy, ClassesByImplOrHolderDerivedOnesToo) {
  EXPECT_EQ(chosen(ModuleWrapPolicy::of<BlockImpl>()), (Paths{"blocks.0", "blocks.1"}));
  EXPECT_EQ(chosen(ModuleWrapPolicy::of<Block>()), (Paths{"blocks.0", "blocks.1"}));
  EXPECT_EQ(chosen(ModuleWrapPolicy::of<SpecialBlockImpl>()), (Paths{"blocks.1"}));
  EXPECT_EQ(chosen(ModuleWrapPolicy::of<Block, nn::Linear>()), kBlocksAndLinears);
  EXPECT_EQ(chosen(ModuleWrapPolicy::of<Transformer, Block>()), (Paths{"blocks.0", "blocks.1"}));
  EXPECT_EQ(chosen(transformer_auto_wrap_policy(ModuleClasses::of<Block, nn::Linear>())), kBlocksAndLinears);
  EXPECT_EQ(chosen(ModuleWrapPolicy(ModuleClasses())), (Paths{}));
}

TEST(WrapPolicy, Lambda) {
  const auto narrow = [](nn::Module& module) {
    return is<nn::LinearImpl>(module) && dynamic_cast<nn::LinearImpl&>(module).options.out_features() == 8;
  };
  EXPECT_EQ(
      chosen(lambda_auto_wrap_policy(narrow)),
      (Paths{
          "blocks.0.attention.out_proj",
          "blocks.0.mlp.2",
          "blocks.1.attention.out_proj",
          "blocks.1.mlp.2",
          "heads.a"}));
}

TEST(WrapPolicy, OrTakesWhatAnyPolicyWants) {
  const Paths expected{
      "blocks.0.attention",
      "blocks.0.mlp.0",
      "blocks.0",
      "blocks.1.attention",
      "blocks.1.mlp.0",
      "blocks.1",
      "batch_norm"};
  const auto by_size = size_based_auto_wrap_policy({.min_num_params = 280});
  EXPECT_EQ(chosen(or_policy({by_size, ModuleWrapPolicy::of<nn::BatchNorm1d>()})), expected);
  EXPECT_EQ(chosen(or_policy({})), (Paths{}));
}

TEST(WrapPolicy, AFunctionOfTheProgramsOwn) {
  std::vector<int64_t> numels;
  const AutoWrapPolicy policy = [&](nn::Module& module, bool recurse, int64_t nonwrapped_numel) {
    numels.push_back(nonwrapped_numel);
    return recurse ? !is<nn::LinearImpl>(module) : true;
  };
  EXPECT_EQ(chosen(nested(), policy), (Paths{"2"}));
  // The root, two layers, then the inner Sequential, its layers, and itself again.
  EXPECT_EQ(numels, (std::vector<int64_t>{120, 30, 30, 60, 30, 30, 60}));
}

// Options are seen here by their address only.
struct Changes {
  std::vector<std::string> made;
  WrapOverride make(const std::string& name) {
    return [this, name](FSDPOptions&) { made.push_back(name); };
  }
  void apply(const ModuleToWrap& module) {
    int64_t stand_in = 0;
    if (module.change) {
      module.change(reinterpret_cast<FSDPOptions&>(stand_in));
    }
  }
};

TEST(WrapPolicy, CustomSaysNoYesOrOtherOptions) {
  Changes changes;
  int asked = 0;
  bool root_first = false;
  const CustomPolicy policy([&](nn::Module& module) -> WrapChoice {
    root_first = asked++ == 0 ? is<TransformerImpl>(module) : root_first;
    if (is<SpecialBlockImpl>(module)) {
      return changes.make("special");
    }
    if (is<nn::LayerNormImpl>(module)) {
      return WrapOverride();
    }
    return is<BlockImpl>(module) || is<nn::EmbeddingImpl>(module) || is<TransformerImpl>(module);
  });
  const auto modules = modules_to_wrap(Transformer(), policy);
  EXPECT_EQ(paths_of(modules), (Paths{"embedding", "blocks.0", "blocks.1"}));
  EXPECT_EQ(asked, 24);
  EXPECT_TRUE(root_first);
  EXPECT_FALSE(modules[0].change);
  EXPECT_FALSE(modules[1].change);
  changes.apply(modules[2]);
  EXPECT_EQ(changes.made, (Paths{"special"}));
}

TEST(WrapPolicy, ClassesThatAreUnitsInAnyCase) {
  Changes changes;
  const auto individually = [&](const AutoWrapPolicy& policy) {
    return policy.and_individually(
        ModuleClasses::of<nn::BatchNorm1d, SpecialBlockImpl>(), changes.make("individually"));
  };
  for (const auto& policy :
       {individually(ModuleWrapPolicy::of<nn::Embedding>()),
        individually(size_based_auto_wrap_policy({.min_num_params = 1000})),
        individually(lambda_auto_wrap_policy([](auto& module) { return is<nn::EmbeddingImpl>(module); }))}) {
    const auto modules = modules_to_wrap(Transformer(), policy);
    const auto paths = paths_of(modules);
    ASSERT_FALSE(paths.empty());
    const bool has_embedding = paths.front() == "embedding";
    EXPECT_EQ(Paths(paths.begin() + has_embedding, paths.end()), (Paths{"blocks.1", "batch_norm"}));
    for (const auto& each : modules) {
      EXPECT_EQ(each.change != nullptr, each.path != "embedding");
    }
  }
  const AutoWrapPolicy special(CustomPolicy([&](nn::Module& module) -> WrapChoice {
    return is<SpecialBlockImpl>(module) ? WrapChoice(changes.make("custom")) : WrapChoice(false);
  }));
  for (const auto& each : modules_to_wrap(Transformer(), individually(special))) {
    changes.apply(each);
  }
  EXPECT_EQ(changes.made, (Paths{"custom", "individually", "individually"}));
}

TEST(WrapPolicy, IgnoredModulesAreNoUnitsAndDoNotCount) {
  Transformer model;
  const IgnoredStates ignored{.modules = {below(*model, "blocks.0"), below(*model, "heads.a")}};
  EXPECT_EQ(
      chosen(model, ModuleWrapPolicy::of<Block, nn::Linear>(), ignored),
      (Paths{"blocks.1.attention.out_proj", "blocks.1.mlp.0", "blocks.1.mlp.2", "blocks.1", "heads.b"}));
  Paths expected;
  std::copy_if(kAll.begin(), kAll.end(), std::back_inserter(expected), [](const std::string& path) {
    return !path.starts_with("blocks.0") && path != "heads.a";
  });
  EXPECT_EQ(chosen(model, always_wrap_policy, ignored), expected);

  const auto small = nested();
  const IgnoredStates one{.modules = {below(*small, "2.0")}};
  EXPECT_EQ(chosen(small, size_based_auto_wrap_policy({.min_num_params = 60}), one), (Paths{}));
  EXPECT_EQ(chosen(small, size_based_auto_wrap_policy({.min_num_params = 30}), one), (Paths{"0", "1", "2.1"}));
}

TEST(WrapPolicy, WhatLiesBelowAnIgnoredModuleIsNoUnitElsewhereEither) {
  const auto shared = linear();
  const auto model = layers({layers({shared}), layers({shared, linear()})});
  EXPECT_EQ(chosen(model, ModuleWrapPolicy::of<nn::Linear>(), {.modules = {below(*model, "0")}}), (Paths{"1.1"}));
}

TEST(WrapPolicy, IgnoredParametersDoNotCount) {
  const auto small = nested();
  const IgnoredStates weight{.params = {below(*small, "2.0").parameters()[0]}};
  EXPECT_EQ(chosen(small, size_based_auto_wrap_policy({.min_num_params = 40}), weight), (Paths{}));
  EXPECT_EQ(chosen(small, size_based_auto_wrap_policy({.min_num_params = 35}), weight), (Paths{"2"}));
}

TEST(WrapPolicy, ASharedModuleIsListedOnce) {
  const auto shared = linear();
  const auto model = layers({shared, layers({shared, linear()})});
  EXPECT_EQ(chosen(model, ModuleWrapPolicy::of<nn::Linear>()), (Paths{"0", "1.1"}));
  EXPECT_EQ(chosen(model, always_wrap_policy), (Paths{"0", "1.1", "1"})); // PyTorch: "0" twice
}

TEST(WrapPolicy, ATiedParameterCountsOnce) {
  struct Biased : nn::Module {
    explicit Biased(const at::Tensor& weight) {
      register_parameter("weight", weight);
      register_parameter("bias", torch::ones({5}));
    }
  };
  const auto weight = torch::ones({5, 5});
  const auto model = layers({layers({std::make_shared<Biased>(weight), std::make_shared<Biased>(weight)}), linear()});
  const auto by_size = [](int64_t size) { return size_based_auto_wrap_policy({.min_num_params = size}); };
  EXPECT_EQ(chosen(model, by_size(35)), (Paths{"0"}));
  EXPECT_EQ(chosen(model, by_size(36)), (Paths{}));
  EXPECT_EQ(chosen(model, by_size(30)), (Paths{"0.0", "1"})); // PyTorch: "0.1" too
}

TEST(WrapPolicy, TellsWhatEachUnitGets) {
  const auto model = nested();
  std::vector<int64_t> numels;
  for (const auto& each : modules_to_wrap(model, always_wrap_policy)) {
    numels.push_back(each.numel);
    EXPECT_EQ(each.module, &below(*model, each.path));
  }
  EXPECT_EQ(numels, (std::vector<int64_t>{30, 30, 30, 30, 0}));
}

TEST(WrapPolicy, ChoosesForFullyShardToo) {
  on_threads(2, [] {
    Transformer model;
    for (const auto& each : modules_to_wrap(model, ModuleWrapPolicy::of<Block>())) {
      fully_shard(*each.module, {.sync_module_states = true});
    }
    fully_shard(model, {.sync_module_states = true});
    EXPECT_EQ(describe(model).units.size(), 3u);
  });
}

TEST(WrapPolicy, RefusesAModelThatHasUnits) {
  on_threads(1, [] {
    const auto model = nested();
    fully_shard(below(*model, "2.1"));
    const auto message = error_message([&] { modules_to_wrap(model, always_wrap_policy); });
    EXPECT_TRUE(
        contains(message, "[auto_wrap_policy] requires modules to not already have FSDP applied, but found '2.1'"));
    fully_shard(model);
    EXPECT_TRUE(contains(error_message([&] { modules_to_wrap(model, always_wrap_policy); }), "but found it in"));
  });
}

TEST(WrapPolicy, RefusesEmptyFunctions) {
  for (const auto& build : std::vector<std::function<void()>>{
           [] { AutoWrapPolicy policy{WrapPolicyFn()}; },
           [] { CustomPolicy policy(nullptr); },
           [] { lambda_auto_wrap_policy(nullptr); },
           [] {
             or_policy({always_wrap_policy, WrapPolicyFn()});
           }}) {
    EXPECT_TRUE(contains(error_message(build), "the function is empty"));
  }
}

} // namespace
} // namespace fsdp::testing
