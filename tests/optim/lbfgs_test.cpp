// LBFGS on shards takes the way of LBFGS on the whole: its products and norms are sums over the ranks.

#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/error.h>
#include <fsdp/fully_shard.h>
#include <fsdp/init.h>
#include <fsdp/optim.h>
#include <fsdp/sharded_tensor.h>

#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp {
namespace {

using testing::contains;
using testing::error_message;
using testing::on_threads;
using torch::Tensor;
using torch::optim::LBFGSOptions;

constexpr int kSteps = 4;
/// Sums in another order differ by some 1e-16 of each; so many iterations make more of it.
constexpr double kBound = 1e-8;

Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, torch::make_generator<at::CPUGeneratorImpl>(seed), torch::kDouble);
}

// Sizes that no number of ranks divides. Built alike by all ranks, without the process's generator, which threads
// share.
torch::nn::Sequential make_net() {
  torch::nn::Sequential net(torch::nn::Linear(5, 7), torch::nn::Tanh(), torch::nn::Linear(7, 3));
  net->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  uint64_t seed = 1;
  for (Tensor& parameter : net->parameters()) {
    parameter.copy_(random(parameter.sizes(), seed++));
  }
  return net;
}

Tensor loss_of(torch::nn::Sequential& net, int rank) {
  const auto seed = static_cast<uint64_t>(rank);
  return (net->forward(random({8, 5}, 50 + seed)) - random({8, 3}, 90 + seed)).square().mean();
}

struct Course {
  std::vector<double> losses; // of all ranks, before each step
  std::vector<Tensor> parameters;
  int evaluations = 0;
};

Course unsharded(int ranks, const LBFGSOptions& options) {
  auto net = make_net();
  torch::optim::LBFGS optimizer(net->parameters(), options);
  Course course;
  for (int step = 0; step < kSteps; ++step) {
    const auto loss = optimizer.step([&] {
      ++course.evaluations;
      optimizer.zero_grad();
      Tensor total = torch::zeros({}, torch::kDouble);
      for (int rank = 0; rank < ranks; ++rank) {
        total = total + loss_of(net, rank) / ranks;
      }
      total.backward();
      return total.detach();
    });
    course.losses.push_back(loss.item<double>());
  }
  for (const Tensor& parameter : net->parameters()) {
    course.parameters.push_back(parameter.detach());
  }
  return course;
}

double average(double value) {
  const auto tensor = torch::full({1}, value, torch::kDouble);
  default_mesh().group()->all_reduce(tensor, ReduceOp::kSum, world_size(), {"test", ""})->wait();
  return tensor.item<double>();
}

template <typename Optimizer>
void train(torch::nn::Sequential& net, Optimizer& optimizer, int steps, Course& course) {
  for (int step = 0; step < steps; ++step) {
    const auto loss = optimizer.step([&] {
      ++course.evaluations;
      optimizer.zero_grad();
      const Tensor mine = loss_of(net, rank());
      mine.backward();
      for (const Tensor& parameter : net->parameters()) { // what is not sharded nobody reduces
        if (!is_sharded(parameter)) {
          default_mesh().group()->all_reduce(parameter.grad(), ReduceOp::kSum, world_size(), {"test", ""})->wait();
        }
      }
      return mine.detach();
    });
    course.losses.push_back(average(loss.template item<double>()));
  }
}

void expect_like(torch::nn::Sequential& net, const Course& course, const Course& expected) {
  EXPECT_EQ(course.evaluations, expected.evaluations);
  ASSERT_EQ(course.losses.size(), expected.losses.size());
  for (size_t i = 0; i < course.losses.size(); ++i) {
    EXPECT_NEAR(course.losses[i], expected.losses[i], kBound * std::abs(expected.losses[i])) << "step " << i;
  }
  const auto shards = parameters(*net);
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto whole = is_sharded(shards[i]) ? sharded(shards[i]).full_tensor() : shards[i].detach();
    EXPECT_TRUE(torch::allclose(whole, expected.parameters[i], kBound, kBound)) << i;
  }
}

std::vector<LBFGSOptions> ways() {
  return {
      LBFGSOptions(0.1).max_iter(5).history_size(3),
      LBFGSOptions(1).max_iter(5).line_search_fn("strong_wolfe"),
      LBFGSOptions(1e-3).max_iter(4).max_eval(30).line_search_fn("strong_wolfe")};
}

class LbfgsOnRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, LbfgsOnRanks, ::testing::Values(1, 2, 3, 4));

TEST_P(LbfgsOnRanks, TakesTheWayOfAnUnshardedRun) {
  for (const auto& options : ways()) {
    const Course expected = unsharded(GetParam(), options);
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    on_threads(GetParam(), [&] {
      auto net = make_net();
      fully_shard(*net[0]->as<torch::nn::Linear>());
      fully_shard(*net);
      optim::LBFGS optimizer(net->parameters(), options);
      Course course;
      train(net, optimizer, kSteps, course);
      expect_like(net, course, expected);
    });
  }
}

TEST_P(LbfgsOnRanks, CountsPlainParametersOnce) {
  const auto options = ways()[1];
  const Course expected = unsharded(GetParam(), options);
  on_threads(GetParam(), [&] {
    auto net = make_net();
    fully_shard(*net, {.ignored_params = {net[0]->as<torch::nn::Linear>()->weight}});
    optim::LBFGS optimizer(net->parameters(), options);
    Course course;
    train(net, optimizer, kSteps, course);
    expect_like(net, course, expected);
  });
}

TEST_P(LbfgsOnRanks, GoesOnFromASavedState) {
  const auto options = ways()[1];
  const Course expected = unsharded(GetParam(), options);
  on_threads(GetParam(), [&] {
    auto net = make_net();
    fully_shard(*net);
    Course course;
    std::stringstream file;
    {
      optim::LBFGS optimizer(net->parameters(), options);
      train(net, optimizer, kSteps / 2, course);
      torch::save(optimizer, file);
    }
    optim::LBFGS optimizer(net->parameters(), options);
    torch::load(optimizer, file);
    train(net, optimizer, kSteps - kSteps / 2, course);
    expect_like(net, course, expected);
  });
}

TEST(LbfgsOnHybridMeshes, CountsReplicasOnce) {
  for (const auto& options : ways()) {
    const Course expected = unsharded(4, options);
    on_threads(4, [&] {
      auto net = make_net();
      fully_shard(*net, {.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"})});
      optim::LBFGS optimizer(net->parameters(), options);
      Course course;
      train(net, optimizer, kSteps, course);
      expect_like(net, course, expected);
    });
  }
}

TEST(LbfgsOverGloo, TakesTheWayOfAnUnshardedRun) {
  testing::on_processes(2, [] {
    init({.backend = "gloo", .device = "cpu"});
    const auto options = ways()[1];
    auto net = make_net();
    fully_shard(*net);
    optim::LBFGS optimizer(net->parameters(), options);
    Course course;
    train(net, optimizer, kSteps, course);
    expect_like(net, course, unsharded(2, options));
    shutdown();
  });
}

// Near a minimum many points have one value.
TEST(Lbfgs, TakesTheSameOfEqualPoints) {
  const auto steps = [](auto* kind, float begin) {
    using Optimizer = std::remove_pointer_t<decltype(kind)>;
    auto x = torch::full({1}, begin).requires_grad_();
    Optimizer optimizer({x}, LBFGSOptions(1).max_iter(1).line_search_fn("strong_wolfe"));
    optimizer.step([&] {
      optimizer.zero_grad();
      const auto loss = 1 + 0.96 * x * x;
      loss.backward();
      return loss;
    });
    return x.detach();
  };
  for (int i = 200; i < 400; ++i) {
    const float begin = 1e-6F * static_cast<float>(i);
    const auto ours = steps(static_cast<optim::LBFGS*>(nullptr), begin);
    const auto theirs = steps(static_cast<torch::optim::LBFGS*>(nullptr), begin);
    EXPECT_TRUE(ours.allclose(theirs, /*rtol=*/1e-3, /*atol=*/1e-7)) << begin << ": " << ours << theirs;
  }
}

TEST(Lbfgs, SaysWhatItCannotDo) {
  auto net = make_net();
  EXPECT_TRUE(contains(
      error_message([&] { optim::LBFGS(net->parameters(), LBFGSOptions().line_search_fn("armijo")); }),
      "[LBFGS] expected line_search_fn \"strong_wolfe\" or none, got \"armijo\""));
  EXPECT_TRUE(contains(
      error_message([&] {
        optim::LBFGS({{net[0]->parameters()}, {net[2]->parameters()}});
      }),
      "[LBFGS] expected one group of parameters"));
  optim::LBFGS optimizer(net->parameters());
  EXPECT_TRUE(contains(error_message([&] { optimizer.step(nullptr); }), "[LBFGS] expected a closure"));
}

} // namespace
} // namespace fsdp
