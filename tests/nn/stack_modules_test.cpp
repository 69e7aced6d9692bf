// A model that no shared_ptr holds, as in LibTorch's MNIST example, trains like any other, bit for bit as unsharded.

#include <cstddef>
#include <memory>
#include <new>
#include <optional>

#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

/// LibTorch's example, smaller. It drops nothing: the ranks of a test share one random number generator.
struct Net : nn::Module {
  Net()
      : conv1(nn::Conv2dOptions(1, 4, /*kernel_size=*/5)),
        conv2(nn::Conv2dOptions(4, 6, /*kernel_size=*/5)),
        conv2_drop(nn::Dropout2dOptions(0.0)),
        fc1(6, 9),
        fc2(9, 5) {
    register_module("conv1", conv1);
    register_module("conv2", conv2);
    register_module("conv2_drop", conv2_drop);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }

  at::Tensor forward(at::Tensor x) {
    x = torch::relu(torch::max_pool2d(conv1->forward(x), 2));
    x = torch::relu(torch::max_pool2d(conv2_drop->forward(conv2->forward(x)), 2));
    x = torch::relu(fc1->forward(x.view({-1, 6})));
    x = torch::dropout(x, /*p=*/0.0, /*train=*/is_training());
    return torch::log_softmax(fc2->forward(x), /*dim=*/1);
  }

  at::Tensor loss(int rank, int step) {
    return torch::nll_loss(forward(subjects::data(rank, step, {3, 1, 16, 16})), subjects::tokens(rank, step, {3}, 5));
  }

  nn::Conv2d conv1, conv2;
  nn::Dropout2d conv2_drop;
  nn::Linear fc1, fc2;
};

/// A pointer to a module that knows of no pointer.
Subject net_in_a_frame() {
  struct Frame {
    Net net;
  };
  auto frame = std::make_shared<Frame>();
  return {
      std::shared_ptr<nn::Module>(frame, &frame->net),
      [frame](int rank, int step) { return frame->net.loss(rank, step); },
      {frame->net.conv2.ptr(), frame->net.fc1.ptr()}};
}

class StackModules : public ::testing::TestWithParam<int> {};

TEST_P(StackModules, TrainAsUnsharded) {
  expect_parity({.make = &net_in_a_frame}, GetParam());
}

TEST_P(StackModules, TrainAsUnshardedFromTheMetaDevice) {
  expect_parity({.make = &net_in_a_frame, .from_meta = true}, GetParam());
}

TEST_P(StackModules, AreTakenByEveryFunction) {
  on_threads(GetParam(), [] {
    Net net;
    fully_shard(net.fc1);
    auto root = fully_shard(net);
    EXPECT_TRUE(is_fsdp(net));
    EXPECT_EQ(as_fsdp(net).unit(), root.unit());
    EXPECT_EQ(describe(net).units.size(), 2u);
    EXPECT_EQ(parameters(net).size(), 8u);
    EXPECT_EQ(named_parameters(net)[7].first, "fc2.bias");
    torch::optim::SGD optimizer(net.parameters(), 0.1);
    net.loss(rank(), 0).backward();
    optimizer.step();
    const torch::NoGradGuard no_grad;
    EXPECT_EQ(call(net, torch::ones({1, 1, 16, 16})).sizes(), (std::vector<int64_t>{1, 5}));
    {
      auto guard = summon_full_params(net);
      EXPECT_TRUE(is_fsdp(net));
      for (auto& parameter : net.named_parameters()) {
        parameter->fill_(2);
      }
      EXPECT_EQ(net.named_parameters()["fc1.weight"].sizes(), (std::vector<int64_t>{9, 6}));
    }
    EXPECT_TRUE(torch::equal(net.fc1->weight, torch::full({9, 6}, 2.0)));
    EXPECT_TRUE(torch::equal(whole_of(net, "conv2.bias"), torch::full({6}, 2.0)));
    net.to(torch::kDouble);
    auto guard = summon_full_params(net);
    EXPECT_EQ(net.fc1->named_parameters()["weight"].scalar_type(), torch::kDouble);
  });
}

TEST_P(StackModules, MayGoBeforeTheirOptimizer) {
  on_threads(GetParam(), [] {
    std::optional<torch::optim::SGD> optimizer;
    {
      Net net;
      fully_shard(net);
      optimizer.emplace(net.parameters(), 0.1);
      net.loss(rank(), 0).backward();
    }
    optimizer->step();
    EXPECT_EQ(optimizer->param_groups()[0].params().size(), 8u);
  });
}

TEST_P(StackModules, MayGoAfterTheirOptimizer) {
  on_threads(GetParam(), [] {
    Net net;
    fully_shard(net);
    {
      torch::optim::SGD optimizer(net.parameters(), 0.1);
      net.loss(rank(), 0).backward();
      optimizer.step();
    }
    net.zero_grad();
    net.loss(rank(), 1).backward();
    EXPECT_TRUE(parameters(net)[0].grad().defined());
  });
}

// What `fully_shard` returned keeps the first one's unit.
// After its `to()` its handles are kept for it, and nothing tells when it goes.
TEST_P(StackModules, OfRecurrentKindGoAfterTheyWereMoved) {
  on_threads(GetParam(), [] {
    std::weak_ptr<engine::Unit> unit;
    for (int time = 0; time < 2; ++time) {
      nn::LSTMImpl lstm(nn::LSTMOptions(4, 3));
      unit = fully_shard(lstm).unit();
      lstm.to(torch::kCPU);
      std::get<0>(lstm.forward(torch::ones({2, 1, 4}))).sum().backward();
      lstm.to(torch::kCPU);
      std::get<0>(lstm.forward(torch::ones({2, 1, 4}))).sum().backward();
      EXPECT_FALSE(unit.expired());
    }
    barrier();
    nn::Linear next(4, 3);
    fully_shard(next); // where those of modules that are gone are let go of
    barrier();
    EXPECT_TRUE(unit.expired());
    next->forward(torch::ones({2, 4})).sum().backward();
  });
}

TEST_P(StackModules, MayLieWhereAnotherWas) {
  on_threads(GetParam(), [] {
    std::optional<Net> net(std::in_place);
    const auto root = fully_shard(*net);
    const Net* address = &*net;
    net.reset();
    net.emplace();
    ASSERT_EQ(&*net, address);
    EXPECT_FALSE(is_fsdp(*net));
    fully_shard(*net);
    EXPECT_NE(as_fsdp(*net).unit(), root.unit());
    net->loss(rank(), 0).backward();
    EXPECT_TRUE(parameters(*net)[0].grad().defined());
  });
}

TEST_P(StackModules, WithoutChildrenMayLieWhereAnotherWas) {
  on_threads(GetParam(), [] {
    alignas(nn::LinearImpl) std::byte place[sizeof(nn::LinearImpl)];
    auto* linear = new (place) nn::LinearImpl(3, 4);
    const auto root = fully_shard(*linear);
    {
      auto guard = summon_full_params(*linear);
      EXPECT_TRUE(is_fsdp(*linear));
    }
    EXPECT_TRUE(is_fsdp(*linear));
    std::destroy_at(linear);
    linear = new (place) nn::LinearImpl(3, 4);
    EXPECT_FALSE(is_fsdp(*linear));
    fully_shard(*linear);
    EXPECT_NE(as_fsdp(*linear).unit(), root.unit());
    std::destroy_at(linear);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, StackModules, ::testing::Values(1, 2, 3));

} // namespace
} // namespace fsdp::testing
