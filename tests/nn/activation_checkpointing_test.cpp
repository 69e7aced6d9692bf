// Modules whose calls run through checkpoints, with a policy's choice in place of changes to the model.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/call.h>
#include <fsdp/checkpoint.h>
#include <fsdp/fully_shard.h>
#include <fsdp/init.h>
#include <fsdp/sharded_tensor.h>

#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using Paths = std::vector<std::string>;

/// Memory of the intermediate results of blocks, watched without being kept.
struct Watch {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  std::vector<bool> recorded;

  void see(const Tensor& tensor) {
    storages.emplace_back(tensor.storage().getWeakStorageImpl());
    recorded.push_back(tensor.requires_grad());
  }
  int64_t alive() const {
    return std::count_if(storages.begin(), storages.end(), [](const auto& weak) { return !weak.expired(); });
  }
};
thread_local Watch watch;

using Pair = std::tuple<Tensor, std::optional<Tensor>>;

struct BlockImpl : nn::Module {
  nn::Linear up{nullptr}, down{nullptr};
  nn::Dropout dropout{nullptr};

  BlockImpl()
      : up(register_module("up", nn::Linear(6, 12))),
        down(register_module("down", nn::Linear(12, 6))),
        dropout(register_module("dropout", nn::Dropout(0.25))) {}

  Pair forward(const Tensor& x, const std::optional<Tensor>& scale, std::vector<Tensor> shifts, double factor) {
    Tensor hidden = dropout(torch::gelu(up(x))) * factor;
    watch.see(hidden);
    Tensor y = x + down(scale ? hidden * *scale : hidden);
    for (const Tensor& shift : shifts) {
      y = y + shift;
    }
    return {y, scale ? std::optional(y.detach().sum()) : std::nullopt};
  }
};
FSDP_MODULE(Block);

struct NetImpl : nn::Module {
  std::vector<Block> blocks;
  Tensor shift;

  NetImpl() {
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
    shift = register_parameter("shift", torch::randn({6}));
  }
  Tensor forward(Tensor x) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      const auto scale = i == 1 ? std::optional(x.mean(1, true)) : std::nullopt;
      const auto [y, sum] = blocks[i](x, scale, std::vector<Tensor>{shift, x.sin()}, 0.5);
      EXPECT_EQ(sum.has_value(), scale.has_value());
      x = y;
    }
    return x;
  }
};
FSDP_MODULE(Net);

Net seeded_net() {
  torch::manual_seed(3);
  return Net();
}

Tensor input(int step) {
  return torch::randn({4, 6}, torch::make_generator<at::CPUGeneratorImpl>(step)).requires_grad_();
}

const auto kBlocks = ModuleWrapPolicy::of<Block>();

/// Outputs, gradients of inputs, random numbers drawn afterwards, parameters at the end.
std::vector<Tensor> train(Net& net, int steps = 3) {
  std::vector<Tensor> results;
  torch::optim::SGD optimizer(parameters(net), 0.1);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const Tensor x = input(step);
    torch::manual_seed(step);
    const Tensor y = net(x);
    results.insert(results.end(), {y.detach(), torch::rand({2})});
    y.square().mean().backward();
    results.insert(results.end(), {x.grad(), torch::rand({2})});
    optimizer.step();
  }
  for (const Tensor& parameter : parameters(net)) {
    results.push_back(is_sharded(parameter) ? sharded(parameter).full_tensor() : parameter.detach());
  }
  return results;
}

void expect_same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
  }
}

TEST(ActivationCheckpointing, ChangesNoBitDropoutIncluded) {
  Net plain = seeded_net(), marked = seeded_net();
  EXPECT_EQ(apply_activation_checkpointing(marked, kBlocks), (Paths{"block0", "block1", "block2"}));
  expect_same_bits(train(marked), train(plain));
}

TEST(ActivationCheckpointing, IntermediateResultsAreNotKept) {
  for (const bool use : {false, true}) {
    watch = {};
    Net net = seeded_net();
    if (use) {
      apply_activation_checkpointing(net, kBlocks);
    }
    const Tensor loss = net(input(0)).sum();
    EXPECT_EQ(watch.alive(), use ? 0 : 3);
    EXPECT_EQ(watch.recorded, std::vector<bool>(3, !use));
    loss.backward();
    EXPECT_EQ(watch.recorded.size(), use ? 6u : 3u);
    EXPECT_EQ(watch.alive(), 0);
  }
}

TEST(ActivationCheckpointing, WithoutAGraphNothingIsDone) {
  watch = {};
  Net net = seeded_net();
  apply_activation_checkpointing(net, kBlocks);
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(net(input(0)).requires_grad());
  EXPECT_EQ(watch.recorded.size(), 3u);
}

TEST(ActivationCheckpointing, OnlyWhatWasChosenAndTwiceIsOnce) {
  watch = {};
  Net net = seeded_net();
  const auto second =
      lambda_auto_wrap_policy([&](nn::Module& module) { return &module == net->blocks[1].ptr().get(); });
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(apply_activation_checkpointing(net, second), (Paths{"block1"}));
  }
  net(input(0)).sum().backward();
  EXPECT_EQ(watch.recorded, (std::vector<bool>{true, false, true, true}));
  EXPECT_EQ(apply_activation_checkpointing(net, ModuleWrapPolicy::of<Net>()), (Paths{})); // not the outermost
}

TEST(ActivationCheckpointing, ByFsdpCallToo) {
  Net plain = seeded_net(), marked = seeded_net();
  apply_activation_checkpointing(marked, kBlocks);
  const auto run = [](Net& net) {
    const Tensor x = input(1);
    torch::manual_seed(2);
    const auto y = std::get<0>(call(net->blocks[0], x, std::nullopt, std::vector<Tensor>{x * 2}, 2.0));
    y.sum().backward();
    return std::vector<Tensor>{y.detach(), x.grad(), net->blocks[0]->up->weight.grad()};
  };
  watch = {};
  const auto results = run(marked);
  EXPECT_EQ(watch.recorded, (std::vector<bool>{false, true}));
  expect_same_bits(results, run(plain));
}

struct OuterImpl : nn::Module {
  Net net;
  OuterImpl() {
    torch::manual_seed(3);
    net = register_module("net", Net());
  }
  Tensor forward(const Tensor& x) {
    return net(x);
  }
};
FSDP_MODULE(Outer);

TEST(ActivationCheckpointing, MayBeNested) {
  const auto run = [](bool use) {
    Outer outer;
    if (use) {
      apply_activation_checkpointing(outer, ModuleWrapPolicy::of<Net, Block>());
    }
    const Tensor x = input(1);
    torch::manual_seed(2);
    outer(x).sum().backward();
    auto results = std::vector<Tensor>{x.grad(), torch::rand({2})};
    for (const Tensor& parameter : outer->parameters()) {
      results.push_back(parameter.grad());
    }
    return results;
  };
  watch = {};
  const auto results = run(true);
  EXPECT_EQ(watch.recorded, (std::vector<bool>{false, false, false, false, false, false, true, true, true}));
  expect_same_bits(results, run(false));
}

TEST(ActivationCheckpointing, KeepsTheModuleUntilBackward) {
  std::weak_ptr<BlockImpl> kept;
  Tensor y;
  {
    Net net = seeded_net();
    apply_activation_checkpointing(net, kBlocks);
    kept = net->blocks[0].ptr();
    y = net(input(0));
  }
  EXPECT_FALSE(kept.expired());
  y.sum().backward();
  EXPECT_TRUE(kept.expired());
}

class OnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OnRanks, ::testing::Values(1, 2, 3, 4));

std::mutex one_generator;

/// The bits of sharded training without checkpoints: with the same random numbers, which rank threads share.
TEST_P(OnRanks, ShardedModulesBeforeOrAfter) {
  for (const bool before : {false, true}) {
    for (const bool reshard : {false, true}) {
      on_threads(GetParam(), [&] {
        const auto make = [&](bool use) {
          std::unique_lock lock(one_generator);
          Net net = seeded_net();
          lock.unlock();
          for (auto& block : net->blocks) {
            block->dropout->options.p(0);
          }
          if (use && before) {
            apply_activation_checkpointing(net, kBlocks);
          }
          for (auto& block : net->blocks) {
            fully_shard(block, {.reshard_after_forward = reshard});
          }
          fully_shard(net);
          if (use && !before) {
            apply_activation_checkpointing(net, kBlocks);
          }
          return net;
        };
        const auto run = [&](Net net) {
          std::vector<Tensor> results;
          torch::optim::SGD optimizer(parameters(net), 0.1);
          for (int step = 0; step < 3; ++step) {
            optimizer.zero_grad();
            const Tensor x = input(10 * rank() + step);
            const Tensor y = net(x);
            y.square().mean().backward();
            results.insert(results.end(), {y.detach(), x.grad()});
            optimizer.step();
          }
          for (const Tensor& parameter : parameters(net)) {
            results.push_back(sharded(parameter).full_tensor());
          }
          return results;
        };
        const auto expected = run(make(false));
        watch = {};
        expect_same_bits(run(make(true)), expected);
        EXPECT_EQ(watch.recorded.size(), 18u);
        EXPECT_EQ(watch.alive(), 0);
      });
    }
  }
}

TEST_P(OnRanks, TheBoundaryStillCasts) {
  on_threads(GetParam(), [] {
    const auto run = [](bool use) {
      std::unique_lock lock(one_generator);
      Net net = seeded_net();
      lock.unlock();
      for (auto& block : net->blocks) {
        block->dropout->options.p(0);
        fully_shard(block, {.mp_policy = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat32}});
      }
      fully_shard(net);
      if (use) {
        apply_activation_checkpointing(net, kBlocks);
      }
      const Tensor x = input(rank());
      const Tensor y = net(x);
      EXPECT_EQ(y.scalar_type(), torch::kFloat32);
      y.sum().backward();
      std::vector<Tensor> results{y.detach(), x.grad()};
      for (const Tensor& parameter : parameters(net)) {
        results.push_back(sharded(parameter).full_grad());
      }
      return results;
    };
    const auto expected = run(false);
    expect_same_bits(run(true), expected);
  });
}

// -- what it cannot do

struct Unknown {
  Tensor tensor;
};

struct OddImpl : nn::Module {
  nn::Linear linear{nullptr};
  OddImpl() : linear(register_module("linear", nn::Linear(6, 6))) {}
  Tensor forward(const Unknown& given) {
    return linear(given.tensor);
  }
};
FSDP_MODULE(Odd);

TEST(ActivationCheckpointing, RefusesTypesThatMayHoldTensors) {
  Odd odd;
  nn::Sequential around(odd);
  odd(Unknown{input(0)}).sum().backward();
  apply_activation_checkpointing(around, ModuleWrapPolicy::of<Odd>());
  const auto message = error_message([&] { odd(Unknown{input(0)}); });
  EXPECT_TRUE(contains(message, "OddImpl"));
  EXPECT_TRUE(contains(message, "Unknown"));
  const torch::NoGradGuard no_grad;
  odd(Unknown{input(0)});
}

struct PlainImpl : nn::Module {
  nn::Linear linear{nullptr};
  PlainImpl() : linear(register_module("linear", nn::Linear(6, 6))) {}
  Tensor forward(const Tensor& x) {
    return linear(x);
  }
};
TORCH_MODULE(Plain);

std::string warnings(const std::function<void()>& run) {
  ::testing::internal::CaptureStderr();
  run();
  return ::testing::internal::GetCapturedStderr();
}

TEST(ActivationCheckpointing, WarnsOnceOfCallsThatItDoesNotSee) {
  Plain seen, unseen;
  nn::Sequential model(seen, unseen);
  apply_activation_checkpointing(model, ModuleWrapPolicy::of<Plain>());
  const auto step = [&] { unseen(call(seen, input(0))).sum().backward(); };
  const auto written = warnings(step);
  EXPECT_TRUE(contains(written, "'1' was chosen and its 'linear.weight' has a gradient"));
  EXPECT_FALSE(contains(written, "'0'"));
  EXPECT_EQ(warnings(step), "");
}

TEST(ActivationCheckpointing, WarnsOfShardedOnesToo) {
  const auto written = warnings([] {
    on_threads(1, [] {
      Plain before, after;
      nn::Sequential model(before, after);
      const auto choose = [&](const Plain& plain) {
        apply_activation_checkpointing(
            model, lambda_auto_wrap_policy([&](nn::Module& module) { return &module == plain.ptr().get(); }));
      };
      choose(before);
      fully_shard(model);
      choose(after);
      model->forward(input(0)).sum().backward();
    });
  });
  EXPECT_TRUE(contains(written, "'0' was chosen"));
  EXPECT_TRUE(contains(written, "'1' was chosen"));
}

TEST(ActivationCheckpointing, SizesAreThoseOfWholeParameters) {
  on_threads(2, [] {
    Net net;
    const auto by_size = size_based_auto_wrap_policy({.min_num_params = 150});
    fully_shard(net, {.sync_module_states = true});
    EXPECT_EQ(apply_activation_checkpointing(net, by_size), (Paths{"block0", "block1", "block2"}));
  });
}

} // namespace
} // namespace fsdp::testing
