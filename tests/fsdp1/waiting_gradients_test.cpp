// In no_sync gradients wait, whole, for the backward that reduces them: users see them and may drop them.

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "engine/unit.h"
#include "fsdp1/train.h"
#include "fsdp1/two_layers.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

nn::Sequential layers() {
  nn::Sequential layers(nn::Linear(5, 3), nn::Linear(3, 2));
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : layers->parameters()) {
    parameter.copy_(torch::arange(1, parameter.numel() + 1).view(parameter.sizes()) / 8);
  }
  return layers;
}

at::Tensor batch(int rank, int number) {
  return torch::full({2, 5}, static_cast<double>(1 + rank + 2 * number) / 4);
}

/// A model, and what gradients would be where nothing is sharded; sums of few small numbers, which are exact.
class Waiting {
 public:
  explicit Waiting(FSDPOptions options) : model(layers(), std::move(options)) {}

  void backward(int number) {
    model(batch(rank(), number)).sum().backward();
  }
  void backward_in_no_sync(int number) {
    const auto guard = model.no_sync();
    backward(number);
  }
  std::vector<at::Tensor> shown() const {
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : model->parameters()) {
      gradients.push_back(parameter.grad());
    }
    return gradients;
  }
  /// Whole, of what was reduced.
  std::vector<at::Tensor> reduced() const {
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : model->parameters()) {
      gradients.push_back(sharded(parameter).full_grad());
    }
    return gradients;
  }

  Wrapped model;
};

/// Of one rank, added up over these batches.
std::vector<at::Tensor> gradients_of_rank(int rank, const std::vector<int>& numbers) {
  auto plain = layers();
  for (const int number : numbers) {
    plain->forward(batch(rank, number)).sum().backward();
  }
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : plain->parameters()) {
    gradients.push_back(parameter.grad());
  }
  return gradients;
}

/// Of all ranks, as they are reduced.
std::vector<at::Tensor> means(const std::vector<int>& numbers) {
  std::vector<at::Tensor> sums;
  for (int rank = 0; rank < world_size(); ++rank) {
    const auto gradients = gradients_of_rank(rank, numbers);
    sums.resize(gradients.size());
    for (size_t i = 0; i < sums.size(); ++i) {
      sums[i] = plus(sums[i], gradients[i]);
    }
  }
  for (auto& sum : sums) {
    sum = sum.defined() ? sum / world_size() : sum;
  }
  return sums;
}

/// As one flat parameter; zero where there is none.
at::Tensor flat(const std::vector<at::Tensor>& gradients) {
  const auto parameters = layers()->parameters();
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < parameters.size(); ++i) {
    parts.push_back((gradients[i].defined() ? gradients[i] : torch::zeros_like(parameters[i]).detach()).flatten());
  }
  return torch::cat(parts);
}

void expect_gradients(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted, bool original) {
  if (!original) {
    ASSERT_EQ(got.size(), 1);
    const at::Tensor expected = flat(wanted);
    ASSERT_TRUE(got[0].defined());
    EXPECT_TRUE(torch::allclose(got[0].narrow(0, 0, expected.numel()), expected, 1e-6));
    return;
  }
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i].defined(), wanted[i].defined());
    EXPECT_TRUE(!got[i].defined() || torch::allclose(got[i], wanted[i], 1e-6)) << got[i] << wanted[i];
  }
}

struct Kind {
  ShardingStrategy strategy;
  bool original;
};

class WaitingGradients : public ::testing::TestWithParam<std::tuple<Kind, int>> {
 protected:
  void run(const std::function<void(Waiting&, bool original)>& body, FSDPOptions options = {}) {
    const auto [kind, ranks] = GetParam();
    options.sharding_strategy = kind.strategy;
    options.use_orig_params = kind.original;
    on_threads(ranks, [&, original = kind.original] {
      Waiting waiting(options);
      body(waiting, original);
    });
  }
};

INSTANTIATE_TEST_SUITE_P(
    Kinds,
    WaitingGradients,
    ::testing::Combine(
        ::testing::Values(
            Kind{ShardingStrategy::kFullShard, true},
            Kind{ShardingStrategy::kShardGradOp, false},
            Kind{ShardingStrategy::kFullShard, false},
            Kind{ShardingStrategy::kNoShard, true}),
        ::testing::Values(1, 2, 3, 4)));

// A penalty's first gradients are for a backward that is to come.
TEST_P(WaitingGradients, MayBeDroppedAfterAGradientOfTheInput) {
  run([](Waiting& waiting, bool original) {
    for (const bool dropped : {true, false}) {
      waiting.model->zero_grad();
      waiting.backward_in_no_sync(0);
      const auto x = batch(rank(), 1).requires_grad_();
      const auto out = waiting.model(x).sum();
      torch::autograd::grad({out}, {x}, {}, /*retain_graph=*/true);
      expect_gradients(waiting.shown(), gradients_of_rank(rank(), {0}), original);
      if (dropped) {
        waiting.model->zero_grad();
      }
      out.backward();
      expect_gradients(waiting.reduced(), means(dropped ? std::vector{1} : std::vector{0, 1}), original);
    }
  });
}

TEST_P(WaitingGradients, AreShownWholeAndOfThisRankAlone) {
  run([](Waiting& waiting, bool original) {
    for (const auto& numbers : {std::vector{0}, std::vector{0, 1}}) {
      waiting.backward_in_no_sync(numbers.back());
      expect_gradients(waiting.shown(), gradients_of_rank(rank(), numbers), original);
    }
    for (const auto& gradient : waiting.shown()) {
      EXPECT_TRUE(original || gradient.numel() == flat({4, at::Tensor()}).numel()); // no padding
    }
  });
}

TEST_P(WaitingGradients, MixWithReducedOnesInAnyOrder) {
  run([](Waiting& waiting, bool original) {
    waiting.backward(0);
    waiting.backward_in_no_sync(1);
    expect_gradients(waiting.shown(), gradients_of_rank(rank(), {1}), original);
    expect_gradients(waiting.reduced(), means({0}), original);
    waiting.backward_in_no_sync(2);
    waiting.backward(3);
    expect_gradients(waiting.reduced(), means({0, 1, 2, 3}), original);
    waiting.backward(4);
    expect_gradients(waiting.reduced(), means({0, 1, 2, 3, 4}), original);
  });
}

TEST_P(WaitingGradients, ComeWhileOthersAreStillBeingReduced) {
  run([](Waiting& waiting, bool original) {
    auto unit = waiting.model.unit();
    unit.set_is_last_backward(false);
    waiting.backward(0);
    unit.set_is_last_backward(true);
    waiting.backward_in_no_sync(1);
    expect_gradients(waiting.shown(), gradients_of_rank(rank(), {1}), original);
    expect_gradients(waiting.reduced(), means({0}), original);
    waiting.backward(2);
    expect_gradients(waiting.reduced(), means({0, 1, 2}), original);
  });
}

struct RunOnce final : torch::autograd::PostAccumulateGradHook {
  explicit RunOnce(std::function<void()> body) : body(std::move(body)) {}
  void operator()(const torch::autograd::Variable&) override {
    if (const auto once = std::exchange(body, nullptr)) {
      const c10::AutoGradMode records(true);
      once();
    }
  }
  std::function<void()> body;
};

TEST_P(WaitingGradients, ComeInAHookOnOneThatIsDelivered) {
  run([](Waiting& waiting, bool original) {
    const auto shard = waiting.model->parameters()[0];
    torch::autograd::impl::set_post_acc_grad_hooks(
        shard, std::make_unique<RunOnce>([&] { waiting.backward_in_no_sync(1); }));
    waiting.backward(0);
    expect_gradients(waiting.shown(), gradients_of_rank(rank(), {1}), original);
    expect_gradients(waiting.reduced(), means({0}), original);
    waiting.backward(2);
    expect_gradients(waiting.reduced(), means({0, 1, 2}), original);
  });
}

// It is added to what stands in `grad`, and may be the first that a backward brings.
TEST_P(WaitingGradients, AreNotWhatAPenaltyOnRegisteredParametersIsAddedTo) {
  run([](Waiting& waiting, bool original) {
    for (const bool recorded_first : {true, false}) {
      waiting.model->zero_grad();
      const auto penalty = [&] {
        auto sum = torch::zeros({});
        for (const auto& parameter : waiting.model->parameters()) {
          sum = sum + parameter.square().sum() / 2;
        }
        return sum;
      };
      for (const int number : {0, 1, 2}) {
        std::optional<FSDPInstance::NoSync> no_sync;
        if (number < 2) {
          no_sync.emplace(waiting.model.no_sync());
        }
        const auto before = recorded_first ? penalty() : torch::zeros({});
        const auto loss = waiting.model(batch(rank(), number)).sum();
        (loss + (recorded_first ? before : penalty())).backward();
      }
      auto wanted = means({0, 1, 2});
      const auto values = layers()->parameters();
      for (size_t i = 0; i < wanted.size(); ++i) {
        wanted[i] = wanted[i] + 3 * values[i].detach();
      }
      expect_gradients(waiting.reduced(), wanted, original);
    }
  });
}

// One rank may have some where another has none; and a step may be open.
TEST_P(WaitingGradients, StayWhereThereIsAPenaltyAlone) {
  run([](Waiting& waiting, bool original) {
    waiting.backward_in_no_sync(0);
    if (original && rank() == 0) {
      waiting.model->parameters()[0].mutable_grad().reset();
    }
    const auto out = waiting.model(batch(rank(), 1)).sum();
    const at::Tensor penalized = waiting.model->parameters()[0];
    (penalized.square().sum() / 2).backward();
    out.backward();
    auto wanted = means({0, 1});
    if (original) {
      wanted[0] = wanted[0] - gradients_of_rank(0, {0})[0] / world_size() + layers()->parameters()[0].detach();
    } else {
      const auto values = layers()->parameters();
      for (size_t i = 0; i < wanted.size(); ++i) {
        wanted[i] = wanted[i] + values[i].detach();
      }
    }
    expect_gradients(waiting.reduced(), wanted, original);
  });
}

TEST_P(WaitingGradients, AreDroppedByZeroGrad) {
  run([](Waiting& waiting, bool original) {
    for (const bool set_to_none : {true, false}) {
      waiting.backward(0);
      waiting.backward_in_no_sync(1);
      waiting.model->zero_grad(set_to_none);
      waiting.backward(2);
      expect_gradients(waiting.reduced(), set_to_none ? means({2}) : means({0, 2}), original);
      waiting.model->zero_grad();
    }
  });
}

TEST_P(WaitingGradients, AreWhatUsersMakeOfThem) {
  run([](Waiting& waiting, bool original) {
    waiting.backward_in_no_sync(1);
    for (const auto& parameter : waiting.model->parameters()) {
      if (parameter.grad().defined()) {
        parameter.grad().mul_(2);
        parameter.mutable_grad() = parameter.grad() * 2;
      }
    }
    waiting.backward(0);
    expect_gradients(waiting.reduced(), means({0, 1, 1, 1, 1}), original);
  });
}

// As in PyTorch, where each rank's whole gradient counts as a part of all.
TEST_P(WaitingGradients, AreWhatIsClipped) {
  run([](Waiting& waiting, bool) {
    waiting.backward_in_no_sync(1);
    auto squares = torch::zeros({});
    const bool is_cut = waiting.model.sharding_strategy() != ShardingStrategy::kNoShard;
    for (int each = 0; each < (is_cut ? world_size() : 1); ++each) {
      for (const auto& gradient : gradients_of_rank(is_cut ? each : rank(), {1})) {
        squares += gradient.square().sum();
      }
    }
    const auto before = waiting.shown()[0].clone();
    const auto norm = waiting.model.clip_grad_norm_(0.5);
    EXPECT_TRUE(torch::allclose(norm, squares.sqrt()));
    EXPECT_TRUE(torch::allclose(waiting.shown()[0], before * 0.5 / norm, 1e-4));
  });
}

TEST_P(WaitingGradients, AreNotShownAsThoseOfAllRanks) {
  run([](Waiting& waiting, bool original) {
    waiting.backward(0);
    if (original) {
      const auto guard = waiting.model.summon_full_params({.with_grads = true});
      expect_gradients(waiting.shown(), means({0}), original);
    }
    waiting.backward_in_no_sync(1);
    if (original) {
      EXPECT_TRUE(contains(
          error_message([&] { (void)waiting.model.summon_full_params({.with_grads = true}); }),
          "wait, in no_sync, for"));
    }
    waiting.backward(2);
    expect_gradients(waiting.reduced(), means({0, 1, 2}), original);
  });
}

TEST_P(WaitingGradients, OfOtherSizesAreRefused) {
  run([](Waiting& waiting, bool) {
    waiting.backward_in_no_sync(1);
    waiting.model->parameters()[0].mutable_grad() = torch::ones({99});
    EXPECT_TRUE(
        contains(error_message([&] { waiting.backward(0); }), "was replaced by one of sizes [99] while it was"));
    waiting.model.unit().reset_iter_state();
    waiting.model->zero_grad();
    waiting.backward(0);
  });
}

TEST_P(WaitingGradients, GoWithWhatWasBegun) {
  run([](Waiting& waiting, bool original) {
    waiting.backward_in_no_sync(1);
    waiting.model.unit().reset_iter_state();
    for (const auto& gradient : waiting.shown()) {
      EXPECT_FALSE(gradient.defined());
    }
    waiting.backward(0);
    expect_gradients(waiting.reduced(), means({0}), original);
  });
}

TEST_P(WaitingGradients, AreOfTheDtypeInWhichTheyAreReduced) {
  const MixedPrecision bf16{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  run(
      [](Waiting& waiting, bool) {
        waiting.backward_in_no_sync(1);
        EXPECT_EQ(waiting.shown()[0].scalar_type(), torch::kFloat);
        waiting.backward_in_no_sync(2);
        waiting.backward(0);
        EXPECT_EQ(waiting.shown()[0].scalar_type(), torch::kFloat);
      },
      {.mixed_precision = bf16});
}

TEST_P(WaitingGradients, OfUnitsThatTheNextBackwardDoesNotReachAreReducedToo) {
  run(
      [](Waiting& waiting, bool) {
        waiting.backward_in_no_sync(1);
        waiting.model[1]->as<nn::Linear>()->forward(torch::ones({2, 3})).sum().backward();
        const auto first_weight = waiting.reduced()[0].flatten().narrow(0, 0, 15);
        EXPECT_TRUE(torch::allclose(first_weight, means({1})[0].flatten(), 1e-6));
      },
      {.auto_wrap_policy = ModuleWrapPolicy::of<nn::Linear>()});
}

struct GateImpl : nn::Module {
  GateImpl()
      : first(register_parameter("first", torch::ones({4, 4}))),
        other(register_parameter("other", torch::ones({4, 4}))) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& extra) {
    return x.matmul(torch::cat({first, extra}).t()).sum() + 3 * x.matmul(other.t()).sum();
  }
  at::Tensor first, other;
};
TORCH_MODULE(Gate);

// Of what was put together, autograd gives views of one gradient: as much memory as the flat parameter's has.
TEST(WaitingGradientsOfFlatParameters, LeaveOthersAlone) {
  on_threads(2, [] {
    Gate gate;
    const auto instance = fsdp::detail::wrap_module(*gate, {});
    const auto extra = torch::ones({4, 4}).requires_grad_(), x = torch::ones({1, 4});
    {
      const auto guard = instance.no_sync();
      gate->forward(x, extra).backward();
    }
    EXPECT_TRUE(extra.grad().equal(torch::ones({4, 4})));
    gate->forward(x, extra).backward();
    const auto gradient = sharded(gate->parameters()[0]).full_grad();
    EXPECT_TRUE(gradient.narrow(0, 0, 16).equal(torch::full({16}, 2.0)));
    EXPECT_TRUE(gradient.narrow(0, 16, 16).equal(torch::full({16}, 6.0)));
  });
}

TEST(WaitingGradientsOfFullyShard, AreNotShown) {
  on_threads(2, [] {
    auto model = layers();
    auto unit = fully_shard(model);
    unit.set_requires_gradient_sync(false);
    model->forward(batch(rank(), 0)).sum().backward();
    EXPECT_FALSE(model->parameters()[0].grad().defined());
    unit.set_requires_gradient_sync(true);
    model->forward(batch(rank(), 1)).sum().backward();
    EXPECT_TRUE(torch::allclose(sharded(model->parameters()[0]).full_grad(), means({0, 1})[0], 1e-6));
  });
}

} // namespace
} // namespace fsdp::testing
