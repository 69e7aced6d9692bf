#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/checkpoint.h>
#include <fsdp/fully_shard.h>
#include <fsdp/init.h>
#include <fsdp/sharded_tensor.h>

#include "support/ranks.h"

namespace fsdp {
namespace {

using testing::on_threads;
using torch::Tensor;

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr};
  torch::nn::Linear down{nullptr};

  BlockImpl()
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})))),
        up(register_module("up", torch::nn::Linear(6, 11))),
        down(register_module("down", torch::nn::Linear(11, 6))) {}

  Tensor forward(const Tensor& x) {
    return x + down(torch::gelu(up(norm(x))));
  }
};
TORCH_MODULE(Block);

enum class Wrap { kNone, kBlocks, kNested, kPairs, kAll };

// How many blocks one checkpoint holds, and whether one checkpoint holds checkpoints.
struct NetImpl : torch::nn::Module {
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};

  NetImpl() {
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
    head = register_module("head", torch::nn::Linear(6, 5));
  }

  Tensor block(size_t i, const Tensor& x, bool wrap) {
    return wrap ? checkpoint([this, i](const Tensor& t) { return blocks[i](t); }, x) : blocks[i](x);
  }

  Tensor pair(size_t i, const Tensor& x, bool wrap, bool inside) {
    const auto both = [this, i, inside](const Tensor& t) { return block(i + 1, block(i, t, inside), inside); };
    return wrap ? checkpoint(both, x) : both(x);
  }

  Tensor forward(const Tensor& x, Wrap wrap) {
    const bool inside = wrap == Wrap::kBlocks || wrap == Wrap::kNested;
    const bool pairs = wrap == Wrap::kPairs || wrap == Wrap::kNested;
    const auto all = [=, this](const Tensor& t) { return head(pair(2, pair(0, t, pairs, inside), pairs, inside)); };
    return wrap == Wrap::kAll ? checkpoint(all, x) : all(x);
  }
};
TORCH_MODULE(Net);

Tensor noise(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, torch::make_generator<at::CPUGeneratorImpl>(seed));
}

Net make_net() {
  Net net;
  torch::NoGradGuard no_grad;
  uint64_t seed = 1;
  for (Tensor& param : net->parameters()) {
    param.copy_(noise(param.sizes(), seed++) * 0.3);
  }
  return net;
}

void shard(Net& net, const FullyShardOptions& options) {
  for (Block& block : net->blocks) {
    fully_shard(*block, options);
  }
  fully_shard(*net, options);
}

// One loss per step, and the gradients of the last step.
struct Outcome {
  std::vector<double> losses;
  std::vector<Tensor> gradients;
};

Tensor whole_gradient(const Tensor& param) {
  return is_sharded(param) ? sharded(param).full_grad() : param.grad();
}

// What ranks with equal data make of their gradients: the sum in rank order, divided. Not always the same bits, for
// three ranks.
void average_equal_gradients(Net& net, int ranks) {
  for (const Tensor& param : net->parameters()) {
    const Tensor one = param.grad().clone();
    for (int i = 1; i < ranks; ++i) {
      param.grad().add_(one);
    }
    param.grad().div_(ranks);
  }
}

// For an unsharded model, `ranks` says whose training to follow.
Outcome train(Net& net, Wrap wrap, bool input_grad, int ranks = 1) {
  Outcome outcome;
  torch::optim::SGD optimizer(parameters(*net), 0.1);
  for (uint64_t step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    Tensor x = noise({4, 6}, step + 100).requires_grad_(input_grad);
    Tensor loss = net(x, wrap).square().mean();
    loss.backward();
    if (ranks > 1) {
      average_equal_gradients(net, ranks);
    }
    outcome.losses.push_back(loss.item<double>());
    if (step == 3) {
      for (const Tensor& param : parameters(*net)) {
        outcome.gradients.push_back(whole_gradient(param).clone());
      }
    }
    optimizer.step();
  }
  return outcome;
}

class CheckpointOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, CheckpointOnRanks, ::testing::Values(1, 2, 3, 4));

void expect_same(const Outcome& outcome, const Outcome& expected) {
  EXPECT_EQ(outcome.losses, expected.losses);
  ASSERT_EQ(outcome.gradients.size(), expected.gradients.size());
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    EXPECT_TRUE(torch::equal(outcome.gradients[i], expected.gradients[i])) << "gradient " << i;
  }
}

// Not one bit may differ.
TEST_P(CheckpointOnRanks, ShardedUnitsTrainAsTheUnshardedModel) {
  for (const bool reshard : {true, false}) {
    for (const bool input_grad : {true, false}) {
      for (const Wrap wrap : {Wrap::kNone, Wrap::kBlocks, Wrap::kPairs, Wrap::kNested, Wrap::kAll}) {
        SCOPED_TRACE(c10::str("reshard ", reshard, ", input_grad ", input_grad, ", wrap ", static_cast<int>(wrap)));
        Net reference = make_net();
        const Outcome expected = train(reference, Wrap::kNone, input_grad, GetParam());
        on_threads(GetParam(), [&] {
          Net net = make_net();
          shard(net, {.reshard_after_forward = reshard});
          expect_same(train(net, wrap, input_grad), expected);
        });
      }
    }
  }
}

} // namespace
} // namespace fsdp
