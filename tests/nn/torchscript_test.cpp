// Modules loaded with torch::jit::load train sharded as they are.

#include <filesystem>
#include <map>
#include <numeric>

#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/script.h>

#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class TorchScript : public ::testing::TestWithParam<int> {};

TEST_P(TorchScript, ModulesTrain) {
  const auto file = std::filesystem::temp_directory_path() / ("fsdp_script_" + std::to_string(getpid()) + ".pt");
  {
    torch::jit::Module features("Features"), module("Net");
    torch::manual_seed(0);
    const auto parameter = [](torch::jit::Module& of, const char* name, at::IntArrayRef sizes) {
      of.register_parameter(name, torch::randn(sizes).requires_grad_(), /*is_buffer=*/false);
    };
    parameter(features, "weight", {2, 1, 3});
    parameter(features, "scale", {2});
    parameter(features, "shift", {2});
    features.register_buffer("mean", torch::zeros({2}));
    features.register_buffer("var", torch::ones({2}));
    features.define(R"(
def forward(self, x):
  y = torch.conv1d(x.unsqueeze(1), self.weight, None, [1], [1])
  y = torch.batch_norm(y, self.scale, self.shift, self.mean, self.var, True, 0.1, 1e-5, False)
  return torch.relu(y).mean(1)
)");
    parameter(module, "weight", {3, 5});
    parameter(module, "bias", {3});
    module.register_module("features", features);
    module.define(R"(
def forward(self, x):
  return torch.tanh(torch.matmul(self.features.forward(x), self.weight.t()) + self.bias)
)");
    module.save(file.string());
  }
  struct Trained {
    std::map<int, std::vector<float>> losses; // by rank
    std::vector<at::Tensor> wholes;
  };
  auto train = [&](const std::vector<int>& ranks, bool sharded_run) {
    // The optimizer of graphs takes other formulas from the third call on: the runs call a different number of times.
    const torch::jit::GraphOptimizerEnabledGuard as_written(false);
    auto module = torch::jit::load(file.string());
    if (sharded_run) {
      auto features = module.attr("features").toModule();
      fully_shard(features);
      fully_shard(module);
      EXPECT_EQ(named_parameters(module).size(), 5u);
      EXPECT_EQ(named_parameters(module)[0].first, "weight");
    }
    const auto shards = parameters(module);
    torch::optim::AdamW optimizer(shards, torch::optim::AdamWOptions(1e-2));
    Trained trained;
    for (int step = 0; step < 10; ++step) {
      std::vector<at::Tensor> sums(shards.size());
      for (const int rank : ranks) {
        optimizer.zero_grad();
        const auto loss = module.forward({subjects::data(rank, step, {2, 5})}).toTensor().pow(2).mean();
        loss.backward();
        trained.losses[rank].push_back(loss.item<float>());
        for (size_t i = 0; i < shards.size(); ++i) {
          sums[i] = plus(sums[i], shards[i].grad());
        }
      }
      for (size_t i = 0; i < shards.size() && !sharded_run; ++i) {
        shards[i].mutable_grad() = sums[i] / static_cast<int64_t>(ranks.size());
      }
      optimizer.step();
    }
    for (const auto& shard : shards) {
      trained.wholes.push_back(sharded_run ? sharded(shard).full_tensor() : shard.detach());
    }
    return trained;
  };
  std::vector<int> all(GetParam());
  std::iota(all.begin(), all.end(), 0);
  const auto wanted = train(all, false);
  on_threads(GetParam(), [&] {
    const auto got = train({rank()}, true);
    EXPECT_EQ(got.losses.at(rank()), wanted.losses.at(rank()));
    for (size_t i = 0; i < got.wholes.size(); ++i) {
      EXPECT_TRUE(torch::equal(got.wholes[i], wanted.wholes[i])) << i;
    }
  });
  std::filesystem::remove(file);
}

TEST_P(TorchScript, ModulesBecomeSeveralUnits) {
  on_threads(GetParam(), [] {
    torch::jit::Module inner("Inner"), outer("Outer");
    inner.register_parameter("weight", torch::ones({3, 3}).requires_grad_(), /*is_buffer=*/false);
    inner.define("def forward(self, x):\n  return torch.tanh(torch.matmul(x, self.weight))\n");
    outer.register_parameter("scale", torch::ones({3}).requires_grad_(), /*is_buffer=*/false);
    outer.register_module("inner", inner);
    outer.define("def forward(self, x):\n  return self.inner.forward(x * self.scale)\n");
    auto below = fully_shard(inner);
    auto root = fully_shard(outer);
    EXPECT_EQ(below.name(), "inner");
    EXPECT_EQ(below.unit()->shared_runtime(), root.unit()->shared_runtime());
    outer.forward({torch::ones({2, 3})}).toTensor().sum().backward();
    EXPECT_EQ(below.unit()->whole_bytes() + root.unit()->whole_bytes(), 0);
    for (const auto& shard : parameters(outer)) {
      EXPECT_TRUE(shard.numel() == 0 || shard.grad().defined());
    }
    EXPECT_THROW(fully_shard(outer), Error);
  });
}

TEST_P(TorchScript, AChildAfterItsParentIsRefused) {
  on_threads(GetParam(), [] {
    torch::jit::Module inner("Inner"), outer("Outer");
    inner.register_parameter("weight", torch::ones({3, 3}).requires_grad_(), /*is_buffer=*/false);
    inner.define("def forward(self, x):\n  return torch.matmul(x, self.weight)\n");
    outer.register_module("inner", inner);
    outer.define("def forward(self, x):\n  return self.inner.forward(x)\n");
    auto root = fully_shard(outer);
    EXPECT_TRUE(contains(error_message([&] { fully_shard(inner); }), "(where it is 'inner.weight')"));
    root.reset_iter_state(); // still the root
    outer.forward({torch::ones({2, 3})}).toTensor().sum().backward();
    EXPECT_TRUE(parameters(outer)[0].grad().defined());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, TorchScript, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
