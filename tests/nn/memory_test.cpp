// The bound on memory and the order of events, as the engine reports them.

#include <deque>
#include <thread>

#include "engine/prediction.h"
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
  explicit StackImpl(int64_t width = 4) {
    scale = register_parameter("scale", torch::ones({width}));
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module(std::to_string(i), nn::Linear(width, width)));
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

/// A sharded model whose events are noted.
class Watched {
 public:
  explicit Watched(nn::Module& module) : root_(fully_shard(module)) {
    root_.unit()->runtime().set_observer([this](const engine::Event& event) {
      events_.push_back(event);
      line_ += (line_.empty() ? "" : " ") + text_of(event);
    });
  }
  /// What happened in it, in one line.
  std::string step(const std::function<void()>& run) {
    line_.clear();
    events_.clear();
    run();
    return line_;
  }
  /// The third of three equal ones: it must be like the second.
  std::string learned(const std::function<void()>& run) {
    step(run);
    const auto second = step(run);
    EXPECT_EQ(step(run), second);
    return second;
  }
  FSDPModule& root() {
    return root_;
  }
  const std::vector<engine::Event>& events() const {
    return events_;
  }

 private:
  FSDPModule root_;
  std::vector<engine::Event> events_;
  std::string line_;
};

struct Stack {
  explicit Stack(FullyShardOptions options = {}, int64_t width = 4) : module(std::make_shared<StackImpl>(width)) {
    for (auto& layer : module->layers) {
      fully_shard(*layer, options);
    }
    watched.emplace(*module);
  }
  std::string step(const std::function<void()>& run) {
    return watched->step(run);
  }
  std::string learned(const std::function<void()>& run) {
    return watched->learned(run);
  }
  std::shared_ptr<StackImpl> module;
  std::optional<Watched> watched;
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
    // 2 was on its way and is let go. The root, used last, is taken for its first use, until 3 shows where the step is.
    EXPECT_EQ(
        stack.step(without_two),
        "+root +0 =root +1 =0 -0 +2 =1 =2 -2 +3 =3 -1 -3 +0 =0 -0 +3 +2 =3 "
        "-3 R3 =2 -2 +1 =1 -1 R1 +0 =0 -0 r3 R0 -root r1 Rroot r0 rroot end");
    for (const auto& item : stack.module->named_parameters()) {
      const bool of_two = item.key().rfind("2.", 0) == 0;
      EXPECT_EQ(item.value().grad().defined(), !of_two) << item.key();
    }
    EXPECT_EQ(
        stack.learned(without_two),
        "+root +0 =root +1 =0 -0 +3 =1 -1 =3 "
        "+1 -3 R3 +0 =1 -1 R1 =0 -0 r3 R0 -root r1 Rroot r0 rroot end");
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
        "-1 +3 -0 +2 =3 -3 R3 +1 =2 -2 R2 =1 -1 r3 R1 r2 R0 r1 r0 end");
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
        "+a +a.inner =a =a.inner -a.inner +b -a +b.inner =b =b.inner "
        "-b.inner Rb.inner +a -b Rb +a.inner =a =a.inner -a.inner rb.inner Ra.inner -a rb Ra ra.inner ra end");
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
        "+0 +1 =0 -0 +2 =1 -1 +0 =2 =0 -0 +1 -2 R2 =1 -1 R1 r2 R0 r1 r0 end");
  });
}

TEST(Schedules, EvaluationLearnsItsOwnOrder) {
  on_threads(2, [] {
    Stack stack;
    const auto x = torch::ones({2, 4});
    torch::NoGradGuard no_grad;
    // The root stays; the end of one evaluation fetches the beginning of the next.
    EXPECT_EQ(stack.learned([&] { stack.module->forward(x); }), "+1 =0 -0 +2 =1 -1 +3 =2 -2 =3 -3 +0");
  });
}

TEST(Schedules, ReshardAfterForwardFalseGathersOnce) {
  on_threads(2, [] {
    Stack stack({.reshard_after_forward = false});
    const auto x = torch::ones({2, 4});
    EXPECT_EQ(
        stack.learned([&] { stack.module->forward(x).backward(); }),
        "+root +0 =root +1 =0 +2 =1 +3 =2 =3 -3 R3 -2 R2 -1 r3 R1 -0 r2 R0 -root r1 Rroot r0 rroot end");
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

class MemoryBound : public ::testing::TestWithParam<int> {};

// At every event: at most two passing units and the prefetched one are whole besides those that stay, and at most two
// reductions are in flight.
TEST_P(MemoryBound, HoldsAtEveryEvent) {
  for (int prefetch : {0, 1, 2}) {
    for (bool checkpointed : {false, true}) {
      on_threads(GetParam(), [&] {
        Stack stack({.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
        stack.watched->root().unit()->runtime().set_prefetch(prefetch);
        const auto x = torch::ones({2, 4}).requires_grad_();
        const int64_t unit_bytes = (16 + 4) * 2, unit_gradient = (16 + 4) * 4;
        for (int step = 0; step < 4; ++step) {
          stack.step([&] { stack.module->forward(x, checkpointed).backward(); });
          for (const auto& event : stack.watched->events()) {
            EXPECT_LE(event.whole_units, 1 + 2 + prefetch);
            // The memory of a cast gather is shared by the ranks, and pieces are aligned to 64 bytes.
            EXPECT_LE(event.whole_bytes, (1 + 2 + prefetch) * (unit_bytes + 2 * 64));
            EXPECT_LE(event.reducing, 2);
            EXPECT_LE(event.gradient_bytes, 3 * unit_gradient + 4 * 4); // with the root's own
          }
          EXPECT_EQ(stack.watched->events().back().whole_units, 0);
          EXPECT_EQ(stack.watched->events().back().whole_bytes, 0);
          EXPECT_EQ(stack.watched->events().back().gradient_bytes, 0);
        }
      });
    }
  }
}

TEST_P(MemoryBound, GatheringInPlaceCostsNothing) {
  on_threads(GetParam(), [] {
    Stack stack;
    stack.step([&] { stack.module->forward(torch::ones({2, 4})).backward(); });
    for (const auto& event : stack.watched->events()) {
      EXPECT_EQ(event.whole_bytes, 0);
    }
  });
}

// Where gathers copy: the bytes that the engine counts stay within what `describe` predicts.
void expect_within_prediction(const FullyShardOptions& options, size_t prefetch, int64_t width) {
  Stack stack(options, width);
  auto& runtime = stack.watched->root().unit()->runtime();
  runtime.set_prefetch(prefetch);
  const auto x = torch::ones({2, width}).requires_grad_();
  const int64_t predicted = engine::prediction::passing_bytes(runtime.units());
  int64_t most = 0;
  for (int step = 0; step < 3; ++step) {
    stack.step([&] { stack.module->forward(x).backward(); });
    for (const auto& event : stack.watched->events()) {
      most = std::max(most, event.whole_bytes + event.gradient_bytes);
    }
    EXPECT_EQ(stack.watched->events().back().whole_bytes, 0);
  }
  EXPECT_LE(most, predicted);
  EXPECT_GT(2 * most, predicted) << "a bound that says little";
}

TEST(MemoryOverGloo, StaysWithinThePrediction) {
  on_processes(4, [] {
    init({.backend = "gloo", .device = "cpu"});
    for (const auto& reshard : {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
      for (const bool bf16 : {false, true}) {
        for (const size_t prefetch : {0, 1, 2}) {
          SCOPED_TRACE(::testing::Message() << reshard.ranks().value_or(0) << " " << bf16 << " " << prefetch);
          FullyShardOptions options{.reshard_after_forward = reshard};
          if (bf16) {
            options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
          }
          expect_within_prediction(options, prefetch, /*width=*/64);
        }
      }
    }
    shutdown();
  });
}

// Rank 1 is slow to read the others' gradients, which have to live until then.
TEST(MemoryOfGradients, ThatASlowRankHasNotReadIsBounded) {
  on_threads(2, [] {
    nn::Sequential model;
    for (int i = 0; i < 16; ++i) {
      model->push_back(nn::Linear(nn::LinearOptions(8, 8).bias(false)));
      fully_shard(*model[i]);
    }
    auto root = fully_shard(*model);
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> gradients; // alive
    size_t most = 0;
    for (const auto& layer : *model) {
      layer.ptr()->as<nn::Linear>()->weight.register_hook([&](const at::Tensor& gradient) {
        if (rank() == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        std::erase_if(gradients, [](const auto& weak) { return weak.expired(); });
        gradients.push_back(gradient.storage().getWeakStorageImpl());
        most = std::max(most, gradients.size());
      });
    }
    model->forward(torch::ones({2, 8})).sum().backward();
    const auto in_flight = static_cast<size_t>(root.unit()->runtime().reducer().max_in_flight());
    EXPECT_LE(most, 1 + 2 * in_flight) << "on rank " << rank();
    EXPECT_GT(most, rank() == 0 ? in_flight : 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, MemoryBound, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
