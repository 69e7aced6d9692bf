// What users do with the gradients of what parameters() gives: hooks, inputs of a backward, autograd::grad; and what
// they see of them on the members.

#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

constexpr int64_t kWidth = 5;

nn::Sequential filled() {
  nn::Sequential model(nn::Linear(kWidth, kWidth), nn::Tanh(), nn::Linear(kWidth, kWidth));
  torch::NoGradGuard no_grad;
  double value = 0.01;
  for (auto& parameter : model->parameters()) {
    parameter.copy_(torch::arange(parameter.numel(), torch::kFloat).view(parameter.sizes()) * value);
    value *= -2;
  }
  return model;
}

/// With the same data on all ranks, a sharded model has the gradients of one that is not.
struct Pair {
  nn::Sequential plain = filled();
  nn::Sequential model = filled();

  Pair() {
    fully_shard(*model[0]);
    fully_shard(*model);
  }
  static at::Tensor loss(nn::Sequential& net) {
    return net->forward(torch::linspace(-1, 1, 4 * kWidth).view({4, kWidth})).pow(2).sum();
  }
  void expect_equal_gradients() const {
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      const auto wanted = plain->parameters()[i].grad();
      const auto whole = sharded(model->parameters()[i]).full_grad();
      ASSERT_EQ(whole.defined(), wanted.defined()) << i;
      EXPECT_TRUE(!wanted.defined() || torch::allclose(whole, wanted)) << i;
    }
  }
};

class ShardGradients : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShardGradients, ::testing::Values(1, 2, 3));

TEST_P(ShardGradients, HooksAreCalledWithThem) {
  on_threads(GetParam(), [] {
    Pair pair;
    std::vector<int> calls(pair.model->parameters().size());
    const auto hook = [&](nn::Sequential& net) {
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        const auto parameter = net->parameters()[i];
        parameter.register_hook([&calls, i, sizes = parameter.sizes().vec()](const at::Tensor& gradient) {
          EXPECT_EQ(gradient.sizes(), c10::IntArrayRef(sizes));
          ++calls[i];
          return gradient * 2;
        });
        parameter.register_hook([](const at::Tensor& gradient) { EXPECT_TRUE(gradient.defined()); });
      }
    };
    hook(pair.plain);
    hook(pair.model);
    for (int step = 1; step < 4; ++step) { // gradients add up
      Pair::loss(pair.plain).backward();
      calls.assign(calls.size(), 0);
      Pair::loss(pair.model).backward();
      EXPECT_EQ(calls, std::vector<int>(calls.size(), 1));
      pair.expect_equal_gradients();
    }
  });
}

// As torch does: what a hook keeps, or gives each time, is no gradient to which others are added.
TEST_P(ShardGradients, WhatAHookKeepsOrGivesStaysAsItIs) {
  on_threads(GetParam(), [] {
    Pair pair;
    std::vector<at::Tensor> kept;
    const auto first = pair.model->parameters()[0], second = pair.model->parameters()[1];
    const auto constant = torch::ones_like(second);
    first.register_hook([&](const at::Tensor& gradient) { kept.push_back(gradient); });
    second.register_hook([&](const at::Tensor&) { return constant; });
    Pair::loss(pair.model).backward();
    const auto as_it_came = kept.at(0).clone();
    Pair::loss(pair.model).backward();
    EXPECT_TRUE(torch::equal(kept[0], as_it_came));
    EXPECT_TRUE(torch::equal(constant, torch::ones_like(constant)));
    EXPECT_TRUE(torch::equal(first.grad(), as_it_came * 2));
    EXPECT_TRUE(torch::equal(second.grad(), constant * 2));
  });
}

TEST_P(ShardGradients, AHookThatIsRemovedIsNotCalled) {
  on_threads(GetParam(), [] {
    Pair pair;
    int calls = 0;
    const auto shard = pair.model->parameters()[1];
    const auto position = shard.register_hook([&](const at::Tensor&) { ++calls; });
    Pair::loss(pair.model).backward();
    shard.remove_hook(position);
    Pair::loss(pair.model).backward();
    EXPECT_EQ(calls, 1);
  });
}

TEST_P(ShardGradients, HooksSurviveAnotherDtype) {
  on_threads(GetParam(), [] {
    nn::Linear model(3, 4);
    fully_shard(*model);
    int calls = 0;
    model->parameters()[0].register_hook([&](const at::Tensor& gradient) {
      EXPECT_EQ(gradient.scalar_type(), torch::kDouble);
      ++calls;
    });
    model->to(torch::kDouble);
    model->forward(torch::ones({2, 3}, torch::kDouble)).sum().backward();
    EXPECT_EQ(calls, 1);
  });
}

TEST_P(ShardGradients, InputsOfABackward) {
  on_threads(GetParam(), [] {
    for (const std::vector<size_t>& chosen : {std::vector<size_t>{0, 1, 2, 3}, {0}, {1, 2}, {3}}) {
      Pair pair;
      const auto inputs = [&](nn::Sequential& net) {
        std::vector<at::Tensor> list;
        for (const size_t i : chosen) {
          list.push_back(net->parameters()[i]);
        }
        return list;
      };
      for (int step = 0; step < 2; ++step) {
        Pair::loss(pair.plain).backward({}, {}, false, inputs(pair.plain));
        Pair::loss(pair.model).backward({}, {}, false, inputs(pair.model));
        pair.expect_equal_gradients();
      }
      Pair::loss(pair.plain).backward();
      Pair::loss(pair.model).backward();
      pair.expect_equal_gradients();
    }
  });
}

at::Tensor squares(const std::vector<at::Tensor>& parameters) {
  at::Tensor sum;
  for (const auto& parameter : parameters) {
    sum = plus(sum, parameter.pow(2).sum());
  }
  return sum;
}

// This rank's part of a penalty of all parameters; its gradients need no reduction.
TEST_P(ShardGradients, InputsOfABackwardThroughAPenaltyOfShards) {
  on_threads(GetParam(), [] {
    Pair pair;
    for (auto* net : {&pair.plain, &pair.model}) {
      const auto parameters = (*net)->parameters();
      (Pair::loss(*net) + squares(parameters)).backward({}, {}, false, parameters);
    }
    pair.expect_equal_gradients();
  });
}

TEST_P(ShardGradients, AutogradGradSaysWhatToGive) {
  on_threads(GetParam(), [] {
    Pair pair;
    const auto shards = pair.model->parameters();
    for (const bool allow_unused : {true, false}) {
      const auto loss = Pair::loss(pair.model);
      const auto said =
          error_message([&] { torch::autograd::grad({loss}, shards, {}, std::nullopt, false, allow_unused); });
      EXPECT_TRUE(contains(said, "'0.weight' was given as an input of autograd::grad")) << said;
      loss.backward();
    }
    const auto loss = Pair::loss(pair.model);
    EXPECT_TRUE(contains(
        error_message([&] { torch::autograd::backward({loss}, {}, std::nullopt, false, shards); }),
        "give the module's member"));
    const at::Tensor member = pair.model[0]->as<nn::Linear>()->weight;
    EXPECT_EQ(torch::autograd::grad({loss}, {member})[0].sizes(), member.sizes());
    const auto penalty = torch::autograd::grad({squares(shards)}, shards);
    for (size_t i = 0; i < shards.size(); ++i) {
      EXPECT_TRUE(torch::equal(penalty[i], shards[i].detach() * 2));
    }
  });
}

TEST_P(ShardGradients, AMemberHasOneAsLongAsItsShardHas) {
  on_threads(GetParam(), [] {
    Pair pair;
    torch::optim::SGD optimizer(pair.model->parameters(), 0.1);
    auto& weight = pair.model[0]->as<nn::Linear>()->weight;
    const std::vector<std::function<void()>> drops = {
        [&] { pair.model->zero_grad(); },
        [&] { optimizer.zero_grad(); },
        [&] { pair.model->parameters()[0].mutable_grad().reset(); }};
    for (const auto& drop : drops) {
      EXPECT_FALSE(weight.grad().defined());
      Pair::loss(pair.model).backward();
      EXPECT_TRUE(weight.grad().defined());
      const auto said = error_message([&] { weight.grad().norm(); });
      EXPECT_EQ(said.find("[gradient of '0.weight'] is on the shard that parameters() gives"), 0) << said;
      drop();
      EXPECT_FALSE(weight.grad().defined());
      EXPECT_FALSE(weight.mutable_grad().defined());
    }
    Pair::loss(pair.model).backward();
    pair.model->zero_grad(/*set_to_none=*/false);
    EXPECT_TRUE(weight.grad().defined());
    Pair::loss(pair.plain).backward();
    Pair::loss(pair.model).backward();
    pair.expect_equal_gradients();
  });
}

// Lists have members registered: `zero_grad()` finds theirs.
TEST_P(ShardGradients, GoWithTheMembersThatAModuleDrops) {
  on_threads(GetParam(), [] {
    struct Lists : nn::Module {
      Lists() {
        list = register_module("list", nn::ParameterList());
        for (int i = 0; i < 2; ++i) {
          list->append(torch::ones({4, 3}).requires_grad_());
        }
      }
      nn::ParameterList list{nullptr};
    } model;
    auto root = fully_shard(model);
    const auto gradient = [&](int i) { return sharded(parameters(model)[i]).full_grad(); };
    (model.list[0].sum() + model.list[1].sum()).backward();
    EXPECT_TRUE(torch::equal(gradient(0), torch::ones({4, 3})));
    model.zero_grad();
    model.list[0].sum().backward();
    EXPECT_TRUE(torch::equal(gradient(0), torch::ones({4, 3})));
    EXPECT_FALSE(gradient(1).defined());
    model.list[0].sum().backward(); // nobody dropped it
    EXPECT_TRUE(torch::equal(gradient(0), torch::full({4, 3}, 2.0)));
    model.zero_grad();
    EXPECT_FALSE(gradient(0).defined());
    model.list[0].sum().backward();
    torch::autograd::grad({model.list[0].sum()}, {model.list[0]}); // the caller's alone
    model.zero_grad();
    model.list[0].sum().backward();
    EXPECT_TRUE(torch::equal(gradient(0), torch::ones({4, 3})));
    model.zero_grad();
    for (const bool last : {false, false, true}) { // not what has not come yet
      root.set_is_last_backward(last);
      model.list[0].sum().backward();
      EXPECT_EQ(model.list[0].mutable_grad().defined(), parameters(model)[0].grad().defined());
    }
    EXPECT_TRUE(torch::equal(gradient(0), torch::full({4, 3}, 3.0)));
  });
}

struct List : nn::Module {
  List() {
    list->append(torch::ones({4, 3}).requires_grad_());
    list->append(torch::ones({4, 3}).requires_grad_());
  }
  nn::ParameterList list = register_module("list", nn::ParameterList());
};

struct WithoutGradient : torch::autograd::Function<WithoutGradient> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext*, const torch::autograd::variable_list&) {
    return {torch::Tensor()};
  }
};

TEST_P(ShardGradients, AreDroppedWithMembersToWhichABackwardBroughtNone) {
  on_threads(GetParam(), [] {
    List model;
    fully_shard(model);
    model.list[0].sum().backward();
    (WithoutGradient::apply(model.list[0] * 2).sum() + model.list[1].sum()).backward();
    EXPECT_TRUE(model.list[0].mutable_grad().defined());
    model.zero_grad();
    model.list[0].sum().backward();
    EXPECT_TRUE(torch::equal(sharded(parameters(model)[0]).full_grad(), torch::ones({4, 3})));
  });
}

TEST_P(ShardGradients, AreDroppedWithMembersWhoseBackwardBrokeOff) {
  on_threads(GetParam(), [] {
    List model;
    auto root = fully_shard(model);
    model.list[0].sum().backward();
    auto hook = model.list[0].register_hook([](const torch::Tensor&) { throw std::runtime_error("no"); });
    EXPECT_THROW(model.list[0].sum().backward(), std::runtime_error);
    model.list[0].remove_hook(hook);
    root.reset_iter_state();
    model.zero_grad();
    model.list[0].sum().backward();
    EXPECT_TRUE(torch::equal(sharded(parameters(model)[0]).full_grad(), torch::ones({4, 3})));
  });
}

TEST_P(ShardGradients, OfMembersThatWereGivenAnotherDtypeAreAdded) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 3);
    fully_shard(*model);
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kFloat}) {
      model->to(dtype);
      model->forward(torch::ones({1, 4}, dtype)).sum().backward();
    }
    EXPECT_TRUE(sharded(parameters(*model)[0]).full_grad().eq(3).all().item<bool>());
  });
}

TEST_P(ShardGradients, HooksOnMembersFromBeforeShardingStay) {
  on_threads(GetParam(), [] {
    nn::Linear model(3, 4);
    int calls = 0;
    model->weight.register_hook([&](const at::Tensor& gradient) {
      EXPECT_EQ(gradient.sizes(), c10::IntArrayRef({4, 3}));
      ++calls;
    });
    fully_shard(*model);
    model->forward(torch::ones({2, 3})).sum().backward();
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

} // namespace
} // namespace fsdp::testing
