// Gradients that no use in a forward announces: the numbers are right, and no more of them are whole at a time than
// `describe` says.

#include "engine/prediction.h"
#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/fused_linear.h"
#include "nn/parity.h"
#include "nn/watched.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

constexpr int64_t kWidth = 32;
constexpr int kLayers = 6;

struct Model {
  nn::Sequential layers;
  std::function<at::Tensor(const at::Tensor& x)> forward;
};

Model make_model(bool fused) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  torch::manual_seed(3);
  nn::Sequential layers;
  for (int i = 0; i < kLayers; ++i) {
    layers->push_back(nn::Linear(nn::LinearOptions(kWidth, kWidth).bias(false)));
  }
  const auto forward = [layers, fused](at::Tensor x) mutable {
    for (size_t i = 0; i < layers->size(); ++i) {
      auto* layer = layers[i]->as<nn::Linear>();
      x = torch::tanh(fused ? FusedLinear::apply(x, layer->weight) : layer->forward(x));
    }
    return x.pow(2).mean();
  };
  return {layers, forward};
}

void shard_layers(const Model& model) {
  for (const auto& layer : *model.layers) {
    fully_shard(*layer.ptr());
  }
}

using Step = std::function<void(const Model& model, const at::Tensor& x)>;

void plain(const Model& model, const at::Tensor& x) {
  model.forward(x).backward();
}

void with_gradient_penalty(const Model& model, const at::Tensor& x) {
  auto input = x.clone().requires_grad_();
  const auto loss = model.forward(input);
  const auto slope = torch::autograd::grad({loss}, {input}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
  (loss + slope.pow(2).sum()).backward();
}

void twice_through_one_graph(const Model& model, const at::Tensor& x) {
  const auto loss = model.forward(x);
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
}

void two_forwards_before_two_backwards(const Model& model, const at::Tensor& x) {
  const auto first = model.forward(x), second = model.forward(x * 2);
  first.backward();
  second.backward();
}

struct Kind {
  const char* name;
  Step step;
  bool fused;
};

const Kind kKinds[] = {
    {"CustomFunctions", plain, true},
    {"GradientPenalty", with_gradient_penalty, false},
    {"RetainedGraph", twice_through_one_graph, false},
    {"TwoForwardsTwoBackwards", two_forwards_before_two_backwards, false}};

class GradientCounts : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Steps, GradientCounts, ::testing::ValuesIn(kKinds), [](const auto& info) {
  return info.param.name;
});

// A rank's gradients are those of its own input, so the mean over equal inputs is that of one process.
TEST_P(GradientCounts, AreThoseOfUnshardedTraining) {
  const auto [name, step, fused] = GetParam();
  const auto x = torch::linspace(-1, 1, 4 * kWidth).view({4, kWidth});
  for (const int ranks : {1, 2, 4}) {
    on_threads(ranks, [&, step = step, fused = fused] {
      const Model plain_model = make_model(fused), model = make_model(fused);
      shard_layers(model);
      fully_shard(*model.layers.ptr());
      for (int i = 0; i < 3; ++i) {
        step(plain_model, x);
        step(model, x);
      }
      for (size_t i = 0; i < kLayers; ++i) {
        const auto expected = plain_model.layers->parameters()[i].grad();
        const auto actual = sharded(model.layers->parameters()[i]).full_grad();
        EXPECT_TRUE(torch::equal(actual, expected)) << i << " differs by " << (actual - expected).abs().max();
      }
    });
  }
}

void expect_within_prediction(const Kind& kind) {
  const Model model = make_model(kind.fused);
  shard_layers(model);
  Watched watched(*model.layers.ptr());
  const int64_t predicted = engine::prediction::passing_bytes(watched.root().unit()->runtime().units());
  const auto x = torch::ones({4, kWidth});
  for (int i = 0; i < 4; ++i) {
    const auto line = watched.step([&] { kind.step(model, x); });
    for (const auto& event : watched.events()) {
      EXPECT_LE(event.whole_bytes + event.gradient_bytes, predicted) << kind.name << ": " << line;
    }
  }
  EXPECT_EQ(watched.events().back().whole_units, 0) << kind.name;
}

TEST_P(GradientCounts, NoMoreIsWholeThanDescribeSays) {
  on_threads(2, [] { expect_within_prediction(GetParam()); });
}

TEST(GradientCountsOverGloo, NoMoreIsWholeThanDescribeSays) {
  on_processes(2, [] {
    init({.backend = "gloo", .device = "cpu"});
    for (const Kind& kind : kKinds) {
      expect_within_prediction(kind);
    }
    shutdown();
  });
}

/// Something that may give parameters other values, between a forward and its backward.
struct Between {
  const char* name;
  std::function<void(const Model& model)> happens;
  bool changes_values;
};

void step_of_an_optimizer(const Model& model) {
  torch::optim::SGD(model.layers->parameters(), 0.1).step();
}

void write_in_a_guard(const Model& model) {
  const auto guard = summon_full_params(*model.layers.ptr());
  const c10::AutoGradMode no_grad(false);
  for (auto& parameter : model.layers->parameters()) {
    parameter.mul_(2);
  }
}

void look_in_a_guard(const Model& model) {
  const auto guard = summon_full_params(*model.layers.ptr(), {.writeback = false});
  EXPECT_EQ(model.layers->parameters()[0].sizes(), at::IntArrayRef({kWidth, kWidth}));
}

void write_past_operators(const Model& model) {
  as_fsdp(*model.layers.ptr()).note_shard_writes();
}

class GraphsThatLive : public ::testing::TestWithParam<Between> {};
INSTANTIATE_TEST_SUITE_P(
    Writes,
    GraphsThatLive,
    ::testing::Values(
        Between{"OptimizerStep", step_of_an_optimizer, true},
        Between{"GuardThatWrites", write_in_a_guard, true},
        Between{"GuardThatLooks", look_in_a_guard, false},
        Between{"AnnouncedWrite", write_past_operators, true}),
    [](const auto& info) { return info.param.name; });

// As torch does where an optimizer steps before a second backward: the graph has saved values that are no more.
void expect_refused_if_changed(const Between& between, bool fused) {
  for (const int ranks : {1, 2, 4}) { // where the mean of equal gradients is exact
    on_threads(ranks, [&] {
      const Model plain_model = make_model(fused), model = make_model(fused);
      shard_layers(model);
      fully_shard(*model.layers.ptr());
      const auto x = torch::linspace(-1, 1, 4 * kWidth).view({4, kWidth});
      const auto first = model.forward(x), second = model.forward(x * 2);
      first.backward();
      between.happens(model);
      if (between.changes_values) {
        try {
          second.backward();
          ADD_FAILURE() << "the second backward used other values than its forward";
        } catch (const c10::Error& error) {
          EXPECT_TRUE(contains(error.what_without_backtrace(), "modified by an inplace operation"));
        }
        barrier();
        return;
      }
      second.backward();
      two_forwards_before_two_backwards(plain_model, x);
      for (size_t i = 0; i < kLayers; ++i) {
        expect_same(
            sharded(model.layers->parameters()[i]).full_grad(), plain_model.layers->parameters()[i].grad(), "gradient");
      }
    });
  }
}

TEST_P(GraphsThatLive, DoNotGoOnWithValuesThatWereChanged) {
  expect_refused_if_changed(GetParam(), /*fused=*/false);
}

TEST_P(GraphsThatLive, NorDoThoseOfCustomFunctions) {
  expect_refused_if_changed(GetParam(), /*fused=*/true);
}

// The first gradients of a penalty are made for a backward that is to come: zeros for what a rank does not use, and
// what earlier backwards have left, go with that one.
TEST(GradientPenalties, ReduceNothingBeforeTheirBackward) {
  on_threads(2, [] {
    const auto layer = [] {
      nn::Linear made(nn::LinearOptions(4, 4).bias(false));
      const torch::NoGradGuard no_grad;
      made->weight.copy_(torch::eye(4));
      return made;
    };
    auto used_by_all = layer(), used_by_first = layer();
    nn::Sequential model(used_by_all, used_by_first);
    fully_shard(*used_by_all);
    fully_shard(*used_by_first);
    auto root = fully_shard(*model);
    root.set_reduce_scatter_unused_params(true);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      root.set_requires_gradient_sync(false);
      used_by_all->forward(torch::ones({1, 4})).sum().backward(); // to be taken along
      root.set_requires_gradient_sync(true);
      auto x = torch::ones({1, 4}).requires_grad_();
      const auto hidden = used_by_all->forward(x);
      const auto out = rank() == 0 ? used_by_first->forward(hidden) : hidden;
      const auto slope = torch::autograd::grad({out.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      for (const auto& shard : model->parameters()) {
        EXPECT_FALSE(shard.grad().defined());
      }
      (out.sum() + slope.sum()).backward();
      const auto gradient = [](const nn::Linear& of) { return sharded(of->parameters()[0]).full_grad(); };
      EXPECT_TRUE(torch::equal(gradient(used_by_all), torch::full({4, 4}, 3.0)));
      EXPECT_TRUE(torch::equal(gradient(used_by_first), torch::full({4, 4}, 1.0)));
    }
  });
}

// The first backward reduces zeros for what nobody has used; what the second brings comes besides.
TEST(GradientCountsOfKeptGraphs, EachBackwardReducesWhatItBrings) {
  on_threads(2, [] {
    const auto layer = [] { return nn::Linear(nn::LinearOptions(4, 4).bias(false)); };
    auto trunk = layer(), expert = layer();
    trunk->weight.requires_grad_(false);
    nn::Sequential model(trunk, expert);
    fully_shard(*trunk);
    fully_shard(*expert);
    auto root = fully_shard(*model);
    root.set_reduce_scatter_unused_params(true);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      const auto prompt = torch::ones({1, 4}).requires_grad_();
      const auto hidden = trunk->forward(prompt);
      hidden.sum().backward({}, /*retain_graph=*/true);
      const auto out = rank() == 0 ? expert->forward(hidden) : hidden; // without tokens on the other
      out.sum().backward();
      const auto gradient = sharded(expert->parameters()[0]).full_grad();
      const auto of_first = hidden.detach().expand({4, 4}) / 2;
      EXPECT_TRUE(torch::allclose(gradient, of_first));
    }
  });
}

class GradientCountsOfAdapters : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(
    AfterBackward, GradientCountsOfAdapters, ::testing::Bool(), [](const auto& resharded) -> std::string {
      return resharded.param ? "Sharded" : "Whole";
    });

// Frozen layers lead to the input, and the trainable one was used by the batch before: on the first rank it is again.
TEST_P(GradientCountsOfAdapters, WhatWaitsGoesWithABackwardThatBringsNoGradient) {
  on_threads(2, [resharded = GetParam()] {
    nn::Linear adapter(4, 4), trunk(4, 4);
    for (auto& parameter : trunk->parameters()) {
      parameter.requires_grad_(false);
    }
    nn::Sequential model(adapter, trunk);
    auto root = fully_shard(*model);
    root.set_reshard_after_backward(resharded);
    for (int step = 0; step < 4; ++step) {
      const bool one_brings_some = step % 2 == 1;
      model->zero_grad();
      root.set_requires_gradient_sync(false);
      trunk->forward(adapter->forward(torch::ones({1, 4}))).sum().backward();
      root.set_requires_gradient_sync(true);
      auto x = torch::ones({1, 4}).requires_grad_();
      const bool brings_some = one_brings_some && rank() == 0;
      trunk->forward(brings_some ? adapter->forward(x) : x).sum().backward();
      EXPECT_TRUE(x.grad().defined());
      for (const auto& shard : adapter->parameters()) {
        EXPECT_TRUE(shard.grad().defined());
      }
      const auto of_a_row = sharded(trunk->parameters()[0]).full_tensor().sum(0);
      const auto bias = sharded(adapter->parameters()[1]).full_grad();
      EXPECT_TRUE(torch::allclose(bias, of_a_row * (one_brings_some ? 1.5 : 1.0)));
    }
  });
}

} // namespace
} // namespace fsdp::testing
