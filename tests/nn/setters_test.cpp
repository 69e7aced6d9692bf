// What the setters of a unit change, as memory, events and gradients show it.

#include <algorithm>

#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;
using engine::EventKind;
using engine::UnitState;

class Setters : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Setters, ::testing::Values(1, 2, 3));

at::Tensor gradient_of_step(nn::Linear& model) {
  model->zero_grad();
  model->forward(subjects::data(rank(), 0, {2, 4})).pow(2).sum().backward();
  return sharded(model->parameters()[0]).full_grad();
}

TEST_P(Setters, AnAllReduceHookChangesGradients) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    auto unit = fully_shard(*model);
    const auto plain = gradient_of_step(model);
    unit.set_all_reduce_hook([](at::Tensor& slice) { slice.mul_(2); });
    EXPECT_TRUE(torch::equal(gradient_of_step(model), plain * 2));
    unit.set_all_reduce_hook(nullptr);
    EXPECT_TRUE(torch::equal(gradient_of_step(model), plain));
  });
}

TEST_P(Setters, AnAllReduceHookIsGivenAUnitsGradientsInOneTensor) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 5);
    auto unit = fully_shard(*model);
    std::vector<at::Tensor> given;
    unit.set_all_reduce_hook([&](at::Tensor& gradients) { given.push_back(gradients.clone()); });
    gradient_of_step(model);
    ASSERT_EQ(given.size(), 1u);
    const int64_t rows = (5 + world_size() - 1) / world_size(); // of the first rank, and as many on the others
    ASSERT_EQ(given[0].sizes(), at::IntArrayRef({rows * 4 + rows}));
    const auto weight = model->parameters()[0].grad(), bias = model->parameters()[1].grad();
    EXPECT_TRUE(torch::equal(given[0].narrow(0, 0, weight.numel()), weight.flatten()));
    EXPECT_TRUE(torch::equal(given[0].narrow(0, rows * 4, bias.numel()), bias));
    EXPECT_FLOAT_EQ(
        given[0].abs().sum().item<float>(), weight.abs().sum().item<float>() + bias.abs().sum().item<float>());
  });
}

TEST_P(Setters, TheDivideFactorHasTwoNames) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    auto unit = fully_shard(*model);
    const auto plain = gradient_of_step(model);
    unit.set_reduce_scatter_divide_factor(0.5 * world_size());
    EXPECT_TRUE(torch::equal(gradient_of_step(model), plain * 2));
  });
}

TEST_P(Setters, ReductionsGetAGroupOfTheirOwn) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    auto unit = fully_shard(*model);
    const auto& bucket = *unit.unit()->buckets()[0];
    const auto plain = gradient_of_step(model);
    EXPECT_EQ(bucket.reduce_group, bucket.gather_group);
    unit.set_separate_reduce_scatter_group();
    EXPECT_NE(bucket.reduce_group, bucket.gather_group);
    EXPECT_TRUE(torch::equal(gradient_of_step(model), plain));
    unit.set_separate_reduce_scatter_group(false);
    EXPECT_EQ(bucket.reduce_group, bucket.gather_group);
    EXPECT_TRUE(torch::equal(gradient_of_step(model), plain));
  });
}

TEST_P(Setters, AGroupOfTheirOwnKeepsTheUsersCollective) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    auto unit = fully_shard(*model);
    const auto plain = gradient_of_step(model);
    std::vector<Group*> seen;
    unit.set_custom_reduce_scatter([&](at::Tensor& output, const at::Tensor& input, Group& group) {
      seen.push_back(&group);
      group.reduce_scatter({{input.clone()}, {{input.numel(), output.numel()}}, {output}}, {"custom", ""})->wait();
    });
    for (const bool separate : {false, true, false}) {
      unit.set_separate_reduce_scatter_group(separate);
      EXPECT_TRUE(torch::equal(gradient_of_step(model), plain));
    }
    ASSERT_EQ(seen.size(), 3u);
    EXPECT_NE(seen[1], seen[0]);
    EXPECT_EQ(seen[2], seen[0]);
  });
}

TEST_P(Setters, ABackwardThatIsNotTheLastLeavesReductionsRunning) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    auto unit = fully_shard(*model);
    const auto& reducer = unit.unit()->runtime().reducer();
    const auto once = gradient_of_step(model);
    unit.set_is_last_backward(false);
    model->zero_grad();
    const auto run = [&] { model->forward(subjects::data(rank(), 0, {2, 4})).pow(2).sum().backward(); };
    run();
    EXPECT_EQ(reducer.in_flight(), 1);
    EXPECT_FALSE(model->parameters()[0].grad().defined());
    unit.set_is_last_backward(true);
    run();
    EXPECT_EQ(reducer.in_flight(), 0);
    EXPECT_TRUE(torch::equal(sharded(model->parameters()[0]).full_grad(), once + once));
  });
}

TEST_P(Setters, AnAsynchronousUnshardArrivesUntilItIsWaitedFor) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    auto unit = fully_shard(*model, {.reshard_after_forward = true});
    auto handle = unit.unshard(/*async_op=*/true);
    EXPECT_EQ(unit.unit()->state(), UnitState::kArriving);
    handle.wait();
    EXPECT_EQ(unit.unit()->state(), UnitState::kWhole);
    handle.wait();
    EXPECT_EQ(unit.unit()->state(), UnitState::kWhole);
    unit.reshard();
    EXPECT_EQ(unit.unit()->state(), UnitState::kSharded);
    UnshardHandle().wait(); // of nothing
  });
}

TEST_P(Setters, AUnitWithoutParametersIsUnshardedToo) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4));
    auto below = fully_shard(*model[0]), root = fully_shard(*model);
    ASSERT_TRUE(root.unit()->params().empty());
    root.unshard();
    root.unshard(/*async_op=*/true).wait();
    EXPECT_EQ(below.unit()->state(), UnitState::kSharded);
    root.reshard();
    EXPECT_EQ(root.unit()->state(), UnitState::kSharded);
    model->forward(torch::ones({2, 4})).sum().backward();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

using Events = std::vector<std::pair<EventKind, std::string>>;

Events events_of(FSDPModule& root, const std::function<void()>& run) {
  Events events;
  auto& runtime = root.unit()->runtime();
  runtime.set_observer(
      [&](const engine::Event& event) { events.emplace_back(event.kind, event.unit == nullptr ? "" : *event.unit); });
  run();
  runtime.set_observer(nullptr);
  return events;
}

ptrdiff_t position(const Events& events, EventKind kind, const std::string& unit) {
  return std::find(events.begin(), events.end(), std::pair(kind, unit)) - events.begin();
}

/// Of the third step, when the schedule is known.
Events events_of_backward(nn::Sequential& model, FSDPModule& root) {
  Events events;
  for (int step = 0; step < 3; ++step) {
    const auto loss = model->forward(torch::ones({2, 4})).sum();
    events = events_of(root, [&] { loss.backward(); });
  }
  return events;
}

TEST_P(Setters, BackwardDoesNotGatherAheadWhereThatIsOff) {
  for (const bool ahead : {true, false}) {
    on_threads(GetParam(), [ahead] {
      nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4), nn::Linear(4, 4), nn::Linear(4, 4));
      for (const auto& layer : *model) {
        fully_shard(*layer.ptr());
      }
      auto root = fully_shard(*model);
      as_fsdp(*model[1]).set_unshard_in_backward(ahead);
      const Events events = events_of_backward(model, root);
      const auto gathered = position(events, EventKind::kUnshard, "1");
      ASSERT_LT(gathered, static_cast<ptrdiff_t>(events.size()));
      EXPECT_EQ(gathered < position(events, EventKind::kReshard, "2"), ahead);
    });
  }
}

/// A setter that takes `recurse`, and how a unit shows that it was called with true.
struct Recursive {
  const char* name;
  void (*set)(FSDPModule&, bool value, bool recurse);
  bool (*value)(const engine::Unit&);
};

const Recursive kRecursive[] = {
    {"set_requires_gradient_sync",
     [](FSDPModule& unit, bool value, bool recurse) { unit.set_requires_gradient_sync(value, recurse); },
     [](const engine::Unit& unit) { return unit.policy.requires_gradient_sync; }},
    {"set_requires_all_reduce",
     [](FSDPModule& unit, bool value, bool recurse) { unit.set_requires_all_reduce(value, recurse); },
     [](const engine::Unit& unit) { return unit.policy.requires_all_reduce; }},
    {"set_reshard_after_forward",
     [](FSDPModule& unit, bool value, bool recurse) { unit.set_reshard_after_forward(value, recurse); },
     [](const engine::Unit& unit) { return unit.reshards_after(engine::Phase::kForward); }},
    {"set_reshard_after_backward",
     [](FSDPModule& unit, bool value, bool recurse) { unit.set_reshard_after_backward(value, recurse); },
     [](const engine::Unit& unit) { return unit.reshards_after(engine::Phase::kBackward); }},
    {"set_reduce_scatter_unused_params",
     [](FSDPModule& unit, bool value, bool recurse) { unit.set_reduce_scatter_unused_params(value, recurse); },
     [](const engine::Unit& unit) { return unit.policy.reduce_unused_params; }},
    {"set_separate_reduce_scatter_group",
     [](FSDPModule& unit, bool value, bool recurse) { unit.set_separate_reduce_scatter_group(value, recurse); },
     [](const engine::Unit& unit) { return unit.buckets()[0]->reduce_group != unit.buckets()[0]->gather_group; }},
};

TEST(RecursiveSetters, ReachTheUnitsBelowOnlyIfAsked) {
  for (const auto& setter : kRecursive) {
    SCOPED_TRACE(setter.name);
    on_threads(2, [&] {
      nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
      auto below = fully_shard(*model[0]), root = fully_shard(*model);
      for (const bool value : {true, false, true}) {
        setter.set(root, value, /*recurse=*/true);
        EXPECT_EQ(setter.value(*root.unit()), value);
        EXPECT_EQ(setter.value(*below.unit()), value);
        setter.set(root, !value, /*recurse=*/false);
        EXPECT_EQ(setter.value(*root.unit()), !value);
        EXPECT_EQ(setter.value(*below.unit()), value);
      }
    });
  }
}

} // namespace
} // namespace fsdp::testing
