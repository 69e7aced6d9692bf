// Models and their units may go at any time, on any thread: when a program lets go of them, not when the engine expects
// it.

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "nn/parity.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

// Many small parameters, each a slice in the home.
nn::Sequential many_parameters(int count) {
  nn::Sequential model;
  for (int i = 0; i < count; ++i) {
    model->push_back(nn::LayerNorm(nn::LayerNormOptions({4})));
  }
  return model;
}

using Use = std::function<void(nn::Sequential&)>;

// `use` is called once with each of the models that are to go.
void train_while_others_go(const Use& use) {
  nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
  for (const auto& layer : *model) {
    fully_shard(*layer.ptr());
  }
  fully_shard(*model);
  std::vector<nn::Sequential> others;
  for (int i = 0; i < 60; ++i) {
    others.push_back(many_parameters(200));
    fully_shard(*others.back());
  }
  for (auto& other : others) {
    use(other);
  }
  barrier();
  std::jthread other_thread([&] {
    for (; !others.empty(); others.pop_back()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  torch::optim::SGD optimizer(parameters(*model), 0.1);
  for (int step = 0; step < 100; ++step) {
    model->forward(torch::ones({2, 4})).sum().backward();
    const torch::NoGradGuard no_grad;
    model->forward(torch::ones({2, 4}));
    optimizer.step();
    optimizer.zero_grad();
  }
}

void evaluate(nn::Sequential& model) {
  const torch::NoGradGuard no_grad;
  model->forward(torch::ones({1, 4}));
}

// As where a garbage collector runs on whatever thread comes along.
TEST(Lifetimes, WholeModelsGoOnAnotherThreadWhileOneTrains) {
  on_threads(2, [] { train_while_others_go(evaluate); });
}

TEST(Lifetimes, WholeModelsGoOnAnotherThreadWhileOneTrainsOverGloo) {
  on_processes(2, [] {
    init({.backend = "gloo", .device = "cpu"});
    train_while_others_go(evaluate);
    shutdown();
  });
}

TEST(Lifetimes, ShardedModelsGoOnAnotherThreadWhileOneTrains) {
  on_threads(2, [] { train_while_others_go([](nn::Sequential& other) { as_fsdp(*other).reshard(); }); });
}

// Of half precision, what is gathered lies in memory that all ranks hand out alike, each for itself.
TEST(Lifetimes, AWholeModelOfHalfPrecisionGoesOnOneRankEarlier) {
  on_threads(2, [] {
    const auto half = [](nn::Sequential model) {
      fully_shard(*model, {.mp_policy = {.param_dtype = c10::kBFloat16}});
      return model;
    };
    const auto evaluate = [](nn::Sequential& model) {
      const torch::NoGradGuard no_grad;
      return model->forward(torch::ones({2, 4}));
    };
    nn::Sequential staying = half(nn::Sequential(nn::Linear(4, 4)));
    for (int round = 0; round < 3; ++round) {
      nn::Sequential leaving = half(nn::Sequential(nn::Linear(4, 4)));
      evaluate(leaving);
      if (rank() == 0) {
        leaving = nullptr;
      }
      const torch::Tensor expected = evaluate(staying);
      staying->forward(torch::ones({2, 4})).sum().backward();
      leaving = nullptr;
      EXPECT_TRUE(torch::equal(evaluate(staying), expected));
    }
  });
}

// The hook's is the last reference: its reduction was left running by a backward whose graph is gone.
TEST(Lifetimes, AModelGoesWhileItsGradientsAreDelivered) {
  on_threads(1, [] {
    auto leaving = std::make_shared<nn::Sequential>(nn::Linear(4, 4), nn::Linear(4, 4));
    nn::Sequential staying(nn::Linear(4, 4));
    auto root = fully_shard(**leaving);
    auto other = fully_shard(*staying);
    share_comm_ctx({root, other});
    root.set_all_reduce_hook([&](at::Tensor&) { leaving = nullptr; });
    root.set_is_last_backward(false);
    (*leaving)->forward(torch::ones({2, 4})).sum().backward();
    root = other;
    other.set_is_last_backward(true);
    staying->forward(torch::ones({2, 4})).sum().backward();
    EXPECT_EQ(leaving, nullptr);
    EXPECT_TRUE(parameters(*staying)[0].grad().defined());
  });
}

} // namespace
} // namespace fsdp::testing
