// The order of events in steps of every kind.

#include "nn/watched.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

// The units used last in forward are whole still when backward comes to them.
constexpr const char* kCarefulBackward = "-3 R3 -2 r3 R2 +1 =1 -1 r2 R1 +0 =0 -0 r1 R0 -root r0 Rroot rroot end";
constexpr const char* kLearned =
    "+root +0 =root +1 =0 -0 +2 =1 -1 +3 =2 =3 "
    "-3 R3 +1 -2 r3 R2 +0 =1 -1 r2 R1 =0 -0 r1 R0 -root r0 Rroot rroot end";

TEST(Schedules, APlainStepIsFirstCarefulThenAhead) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4});
    auto run = [&] { stack.module->forward(x).backward(); };
    // Nothing is known yet: the unit touched before stays until another two are.
    EXPECT_EQ(stack.step(run), std::string("+root =root +0 =0 +1 =1 -0 +2 =2 -1 +3 =3 ") + kCarefulBackward);
    EXPECT_EQ(stack.step(run), kLearned);
    EXPECT_EQ(stack.step(run), kLearned);
  });
}

TEST(Schedules, AStepThatDiffersIsRightAndTheNextIsAheadAgain) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4});
    auto whole = [&] { stack.module->forward(x).backward(); };
    auto without_two = [&] {
      auto& layers = stack.module->layers;
      (layers[3](layers[1](layers[0](x * stack.module->scale))) * stack.module->scale).sum().backward();
    };
    stack.step(whole);
    stack.step(whole);
    stack.module->zero_grad();
    // 2 was on its way and is let go.
    EXPECT_EQ(
        stack.step(without_two),
        "+root +0 =root +1 =0 -0 +2 =1 -2 +3 =3 -3 R3 -1 r3 R1 +0 =0 -0 r1 R0 -root r0 Rroot rroot end");
    for (const auto& item : stack.module->named_parameters()) {
      const bool of_two = item.key().rfind("2.", 0) == 0;
      EXPECT_EQ(item.value().grad().defined(), !of_two) << item.key();
    }
    EXPECT_EQ(
        stack.learned(without_two),
        "+root +0 =root +1 =0 -0 +3 =1 =3 -3 R3 +0 -1 r3 R1 =0 -0 r1 R0 -root r0 Rroot rroot end");
    stack.step(whole);
    EXPECT_EQ(stack.step(whole), kLearned);
  });
}

// Recomputing a unit and differentiating it is one use.
TEST(Schedules, RecomputedUnitsAreGatheredOnceForBackward) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4}).requires_grad_();
    EXPECT_EQ(stack.learned([&] { stack.module->forward(x, /*checkpointed=*/true).backward(); }), kLearned);
  });
}

TEST(Schedules, AUnitUsedAgainIsReducedAfterItsLastGradient) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4});
    auto& layers = stack.module->layers;
    // 0 1 2 3 0 1
    auto run = [&] {
      auto out = x;
      for (int i : {0, 1, 2, 3, 0, 1}) {
        out = torch::tanh(layers[i](out));
      }
      out.sum().backward();
    };
    // The first use of 0 has no gradient to give to its input, and so needs no weight in backward.
    EXPECT_EQ(
        stack.learned(run),
        "+0 +1 =0 -0 +2 =1 -1 +3 =2 -2 +0 =3 -3 +1 =0 =1 "
        "-1 +3 -0 +2 =3 -3 R3 +1 =2 -2 r3 R2 =1 -1 r2 R1 r1 R0 r0 end");
  });
}

/// A unit with a unit inside, used between its own parameters' uses.
struct NestImpl : nn::Module {
  NestImpl()
      : before(register_module("before", nn::Linear(4, 4))),
        inner(register_module("inner", nn::Linear(4, 4))),
        after(register_module("after", nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(after(torch::tanh(inner(torch::tanh(before(x))))));
  }
  nn::Linear before, inner, after;
};

TEST(Schedules, AUnitAroundAnotherStaysUntilItsEnd) {
  on_threads(2, [] {
    auto model = std::make_shared<nn::Module>();
    std::vector<std::shared_ptr<NestImpl>> nests;
    for (const char* name : {"a", "b"}) {
      nests.push_back(model->register_module(name, std::make_shared<NestImpl>()));
      fully_shard(*nests.back()->inner);
      fully_shard(*nests.back());
    }
    Watched watched(*model);
    const auto x = torch::ones({2, 4});
    EXPECT_EQ(
        watched.learned([&] { nests[1]->forward(nests[0]->forward(x)).sum().backward(); }),
        "+a +a.inner =a +b =a.inner -a -a.inner +b.inner =b +a =b.inner "
        "-b.inner Rb.inner -b rb.inner Rb +a.inner =a =a.inner -a.inner rb Ra.inner -a ra.inner Ra ra end");
  });
}

struct ProjectionImpl : nn::Module {
  explicit ProjectionImpl(const at::Tensor& weight) : weight(register_parameter("weight", weight)) {}
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(torch::matmul(x, weight));
  }
  at::Tensor weight;
};
TORCH_MODULE(Projection);

TEST(Schedules, AWeightOfTwoUnitsIsOfTheFirstAndGatheredForBoth) {
  on_threads(2, [] {
    const auto shared = torch::ones({4, 4}).requires_grad_();
    const auto own = [] { return torch::ones({4, 4}).requires_grad_(); };
    nn::Sequential model{Projection(shared), Projection(own()), Projection(own()), Projection(shared)};
    for (const auto& layer : *model) {
      fully_shard(*layer.ptr());
    }
    Watched watched(*model);
    const auto x = torch::ones({2, 4});
    EXPECT_EQ(
        watched.learned([&] { model->forward(x).sum().backward(); }),
        "+0 +1 =0 -0 +2 =1 -1 +0 =2 =0 -0 +1 -2 R2 =1 -1 r2 R1 r1 R0 r0 end");
  });
}

TEST(Schedules, EvaluationLearnsItsOwnOrder) {
  on_threads(2, [] {
    Stack stack({.mp_policy = {.param_dtype = torch::kBFloat16}});
    const auto x = torch::ones({2, 4});
    torch::NoGradGuard no_grad;
    stack.step([&] { stack.module->forward(x); });
    // The root stays; the end of one evaluation fetches the beginning of the next.
    EXPECT_EQ(stack.learned([&] { stack.module->forward(x); }), "-3 +0 +1 =0 -0 +2 =1 -1 +3 =2 -2 =3");
  });
}

// Ranks that look alone, as they may there, would learn different ones.
TEST(Schedules, EvaluationLearnsNothingOfGathersThatMoveNothing) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4});
    torch::NoGradGuard no_grad;
    stack.step([&] { stack.module->forward(x); });
    const auto line = stack.learned([&] { stack.module->forward(x); });
    EXPECT_EQ(line, "-2 +0 =0 -3 +1 =1 -0 +2 =2 -1 +3 =3");
    stack.module->layers[1]->weight.norm();
    stack.step([&] { stack.module->forward(x); });
    EXPECT_EQ(stack.learned([&] { stack.module->forward(x); }), line);
  });
}

TEST(Schedules, ReshardAfterForwardFalseGathersOnce) {
  on_threads(2, [] {
    Stack stack({.reshard_after_forward = false});
    const auto x = torch::ones({2, 4});
    EXPECT_EQ(
        stack.learned([&] { stack.module->forward(x).backward(); }),
        "+root +0 =root +1 =0 +2 =1 +3 =2 =3 -3 R3 -2 r3 R2 -1 r2 R1 -0 r1 R0 -root r0 Rroot rroot end");
  });
}

TEST(Schedules, UnsynchronizedGradientsAreNotReduced) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4});
    stack.watched->root().set_requires_gradient_sync(false);
    const auto line = stack.step([&] { stack.module->forward(x).backward(); });
    EXPECT_EQ(line.find('R'), std::string::npos) << line;
    EXPECT_FALSE(stack.module->parameters()[0].grad().defined());
    stack.watched->root().set_requires_gradient_sync(true);
    stack.step([&] { stack.module->forward(x).backward(); });
    EXPECT_TRUE(stack.module->parameters()[0].grad().defined());
  });
}

TEST(Schedules, AloneThereIsTheSameOrder) {
  on_threads(1, [] {
    Stack stack;
    const auto x = torch::ones({2, 4});
    auto run = [&] { stack.module->forward(x).backward(); };
    stack.step(run);
    EXPECT_EQ(stack.step(run), kLearned);
  });
}

TEST(Schedules, AskedForPrefetchesComeBeforeTheUnitsOwnUse) {
  on_threads(2, [] {
    Stack stack;
    auto& layers = stack.module->layers;
    as_fsdp(*layers[0]).set_modules_to_forward_prefetch({as_fsdp(*layers[2]), as_fsdp(*layers[3])});
    as_fsdp(*layers[3]).set_modules_to_backward_prefetch({as_fsdp(*layers[1])});
    const auto x = torch::ones({2, 4}).requires_grad_();
    const auto first = stack.step([&] { stack.module->forward(x).backward(); });
    // In the first step, which knows no order of its own.
    EXPECT_NE(first.find("+0 +2 +3 =0"), std::string::npos) << first;
    const auto backward = first.substr(first.find("=3"));
    EXPECT_LT(backward.find("+1"), backward.find("=2")) << first;
  });
}

TEST(Schedules, AMistakenPrefetchEndsWithBackward) {
  on_threads(2, [] {
    Stack stack;
    auto& layers = stack.module->layers;
    as_fsdp(*layers[3]).set_modules_to_forward_prefetch({as_fsdp(*layers[0])});
    as_fsdp(*layers[0]).set_modules_to_backward_prefetch({as_fsdp(*layers[2])});
    const auto x = torch::ones({2, 4}).requires_grad_();
    const auto line = stack.learned([&] { stack.module->forward(x).backward(); });
    EXPECT_NE(line.find("+2 =0"), std::string::npos) << line; // as was asked for, though 2 is not used again
    EXPECT_EQ(stack.watched->events().back().whole_units, 0) << line;
  });
}

TEST(Schedules, OfTheUnitsSettingsForReductionsTheMostHolds) {
  on_threads(2, [] {
    for (const bool root_first : {false, true}) {
      Stack stack;
      auto& root = stack.watched->root();
      auto first = as_fsdp(*stack.module->layers[0]);
      if (!root_first) {
        first.set_reduce_scatter_max_input_buffers(4);
      }
      root.set_reduce_scatter_max_input_buffers(3, /*recurse=*/false);
      if (root_first) {
        first.set_reduce_scatter_max_input_buffers(4);
      }
      EXPECT_EQ(root.unit()->runtime().reducer().max_in_flight(), 4);
      first.set_reduce_scatter_max_input_buffers(1);
      EXPECT_EQ(root.unit()->runtime().reducer().max_in_flight(), 3);
    }
    nn::Linear inner(4, 4);
    fully_shard(*inner).set_reduce_scatter_max_input_buffers(5);
    nn::Sequential outer(inner);
    EXPECT_EQ(fully_shard(*outer).unit()->runtime().reducer().max_in_flight(), 5) << "set before there was a root";
  });
}

TEST(Schedules, UnitsShareOneGroupForTheirReductions) {
  on_threads(2, [] {
    Stack stack;
    auto& root = stack.watched->root();
    root.set_separate_reduce_scatter_group(true);
    const auto& group = root.unit()->buckets()[0]->reduce_group;
    EXPECT_NE(group, root.unit()->buckets()[0]->gather_group);
    for (auto& layer : stack.module->layers) {
      EXPECT_EQ(as_fsdp(*layer).unit()->buckets()[0]->reduce_group, group);
    }
  });
}

} // namespace
} // namespace fsdp::testing
