// The bound on memory and the order of events, as the engine reports them.

#include <deque>

#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;
using engine::EventKind;

std::string text_of(const engine::Event& event) {
  static const std::map<EventKind, std::string> words{
      {EventKind::kUnshard, "+"},
      {EventKind::kWait, "="},
      {EventKind::kReshard, "-"},
      {EventKind::kReduce, "R"},
      {EventKind::kReduced, "r"},
      {EventKind::kEndBackward, "end"}};
  return words.at(event.kind) + (event.unit == nullptr ? "" : event.unit->empty() ? "root" : *event.unit);
}

/// Three layers and a root with a parameter of its own at the beginning and the end.
struct StackImpl : nn::Module {
  StackImpl() {
    scale = register_parameter("scale", torch::ones({4}));
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module(std::to_string(i), nn::Linear(4, 4)));
    }
  }
  at::Tensor forward(at::Tensor x, bool checkpointed = false) {
    x = x * scale;
    for (auto& layer : layers) {
      x = checkpointed ? checkpoint([layer](const at::Tensor& in) mutable { return torch::tanh(layer(in)); }, x)
                       : torch::tanh(layer(x));
    }
    return (x * scale).sum();
  }
  at::Tensor scale;
  std::vector<nn::Linear> layers;
};

struct Stack {
  explicit Stack(FullyShardOptions options = {}) {
    for (auto& layer : module->layers) {
      fully_shard(*layer, options);
    }
    root.emplace(fully_shard(*module));
    root->unit()->runtime().set_observer([this](const engine::Event& event) {
      events.push_back(event);
      texts.push_back(text_of(event));
    });
  }
  std::string step(const std::function<void()>& run) {
    texts.clear();
    events.clear();
    run();
    std::string line;
    for (const auto& text : texts) {
      line += (line.empty() ? "" : " ") + text;
    }
    return line;
  }
  std::shared_ptr<StackImpl> module = std::make_shared<StackImpl>();
  std::optional<FSDPModule> root;
  std::vector<engine::Event> events;
  std::vector<std::string> texts;
};

constexpr const char* kCarefulBackward =
    "+3 =3 -3 R3 +2 =2 -2 R2 +1 =1 -1 r3 R1 +0 =0 -0 r2 R0 -root r1 Rroot r0 rroot end";
constexpr const char* kLearned =
    "+root +0 =root +1 =0 -0 +2 =1 -1 +3 =2 -2 =3 "
    "+2 -3 R3 +1 =2 -2 R2 +0 =1 -1 r3 R1 =0 -0 r2 R0 -root r1 Rroot r0 rroot end";

TEST(Schedules, APlainStepIsFirstCarefulThenAhead) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4});
    auto run = [&] { stack.module->forward(x).backward(); };
    // Nothing is known yet: the unit touched before stays until another two are.
    EXPECT_EQ(stack.step(run), std::string("+root =root +0 =0 +1 =1 -0 +2 =2 -1 +3 =3 -2 -3 ") + kCarefulBackward);
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
    stack.step(without_two);
    for (const auto& item : stack.module->named_parameters()) {
      const bool of_two = item.key().rfind("2.", 0) == 0;
      EXPECT_EQ(item.value().grad().defined(), !of_two) << item.key();
    }
    const auto learned = stack.step(without_two);
    EXPECT_EQ(learned, stack.step(without_two));
    EXPECT_EQ(learned.find("+2"), std::string::npos) << learned; // not expected any more
    EXPECT_NE(learned.find("+3 =1"), std::string::npos) << learned; // prefetched while 1 is used
    stack.step(whole);
    EXPECT_EQ(stack.step(whole), kLearned);
  });
}

TEST(Schedules, RecomputedUnitsAreReducedOnce) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4}).requires_grad_();
    auto run = [&] { stack.module->forward(x, /*checkpointed=*/true).backward(); };
    stack.step(run);
    const auto line = stack.step(run);
    for (const char* unit : {"R0", "R1", "R2", "R3", "Rroot"}) {
      EXPECT_EQ(line.find(unit), line.rfind(unit)) << line;
      EXPECT_NE(line.find(unit), std::string::npos) << line;
    }
    EXPECT_EQ(line, stack.step(run));
  });
}

TEST(Schedules, AUnitUsedAgainIsReducedAfterItsLastGradient) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4});
    auto run = [&] {
      stack.module->forward(torch::tanh(stack.module->layers[0](stack.module->forward(x) * x))).backward();
    };
    stack.step(run);
    const auto line = stack.step(run);
    for (const char* unit : {"R0", "R1", "R2", "R3", "Rroot"}) {
      EXPECT_EQ(line.find(unit), line.rfind(unit)) << line;
    }
    EXPECT_EQ(line, stack.step(run));
  });
}

TEST(Schedules, EvaluationLearnsItsOwnOrder) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4});
    torch::NoGradGuard no_grad;
    auto run = [&] { stack.module->forward(x); };
    stack.step(run);
    stack.step(run);
    const auto third = stack.step(run);
    EXPECT_EQ(third, stack.step(run));
    EXPECT_NE(third.find("+2 =1"), std::string::npos) << third;
  });
}

TEST(Schedules, ReshardAfterForwardFalseGathersOnce) {
  on_threads(2, [] {
    Stack stack({.reshard_after_forward = false});
    const auto x = torch::ones({2, 4});
    auto run = [&] { stack.module->forward(x).backward(); };
    stack.step(run);
    const auto line = stack.step(run);
    for (const char* unit : {"+0", "+1", "+2", "+3", "+root"}) {
      EXPECT_EQ(line.find(unit), line.rfind(unit)) << line;
    }
  });
}

TEST(Schedules, UnsynchronizedGradientsAreNotReduced) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4});
    stack.root->set_requires_gradient_sync(false);
    const auto line = stack.step([&] { stack.module->forward(x).backward(); });
    EXPECT_EQ(line.find('R'), std::string::npos) << line;
    EXPECT_FALSE(stack.module->parameters()[0].grad().defined());
    stack.root->set_requires_gradient_sync(true);
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

class MemoryBound : public ::testing::TestWithParam<int> {};

// At every event: at most two passing units and the prefetched one are whole besides those that stay, and at most two
// reductions are in flight.
TEST_P(MemoryBound, HoldsAtEveryEvent) {
  for (int prefetch : {0, 1, 2}) {
    for (bool checkpointed : {false, true}) {
      on_threads(GetParam(), [&] {
        Stack stack({.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
        stack.root->unit()->runtime().set_prefetch(prefetch);
        const auto x = torch::ones({2, 4}).requires_grad_();
        const int64_t unit_bytes = (16 + 4) * 2, unit_gradient = (16 + 4) * 4;
        for (int step = 0; step < 4; ++step) {
          stack.step([&] { stack.module->forward(x, checkpointed).backward(); });
          for (const auto& event : stack.events) {
            EXPECT_LE(event.whole_units, 1 + 2 + prefetch);
            // The memory of a cast gather is shared by the ranks, and pieces are aligned to 64 bytes.
            EXPECT_LE(event.whole_bytes, (1 + 2 + prefetch) * (unit_bytes + 2 * 64));
            EXPECT_LE(event.reducing, 2);
            EXPECT_LE(event.gradient_bytes, 3 * unit_gradient + 4 * 4); // with the root's own
          }
          EXPECT_EQ(stack.events.back().whole_units, 0);
          EXPECT_EQ(stack.events.back().whole_bytes, 0);
          EXPECT_EQ(stack.events.back().gradient_bytes, 0);
        }
      });
    }
  }
}

TEST_P(MemoryBound, GatheringInPlaceCostsNothing) {
  on_threads(GetParam(), [] {
    Stack stack;
    stack.step([&] { stack.module->forward(torch::ones({2, 4})).backward(); });
    for (const auto& event : stack.events) {
      EXPECT_EQ(event.whole_bytes, 0);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, MemoryBound, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
