// One rank alone reads what it may read alone, where gathers need all ranks: none issues another collective for it.

#include <functional>
#include <mutex>
#include <vector>

#include "nn/parity.h"
#include "nn/subjects.h"
#include "nn/watched.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

using Model = std::shared_ptr<StackImpl>; // its root has a parameter at both ends

Model make_model() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(5);
  return std::make_shared<StackImpl>(6);
}

void evaluate(const Model& model) {
  const torch::NoGradGuard no_grad;
  model->forward(torch::ones({2, 6}));
}

FSDPModule unsharded(const Model& model, int layer) {
  auto unit = as_fsdp(*model->layers[layer]);
  unit.unshard();
  return unit;
}

/// The first rank's, at a layer.
using Look = std::function<void(int layer)>;
using What = std::function<void(const Model&, const Look&)>;
const What kNothing = [](const Model&, const Look&) {};

/// What all ranks do in a step, and when the first one looks.
struct Program {
  const char* name;
  What between_steps = kNothing;
  What before_backward = kNothing;
  What before_optimizer = kNothing;
  bool first_layer_is_in_place = false; ///< where others are cast
  bool first_layer_names_the_third = false; ///< to be gathered ahead when it is used itself
};

const Program kPrograms[] = {
    {.name = "AtWhatWasUnshardedForIt",
     .between_steps =
         [](const Model& model, const Look& look) {
           auto unit = unsharded(model, 0);
           look(0);
           unit.reshard();
         }},
    {.name = "AtWhatWasUnshardedForTheNextStep",
     .between_steps =
         [](const Model& model, const Look& look) {
           unsharded(model, 0);
           look(0);
         }},
    {.name = "AtWhatWasUnshardedForTheMidstOfIt",
     .between_steps =
         [](const Model& model, const Look& look) {
           unsharded(model, 2);
           look(2);
         }},
    {.name = "BetweenEvaluationsAtWhatWasUnsharded",
     .between_steps =
         [](const Model& model, const Look& look) {
           unsharded(model, 2);
           look(2);
           evaluate(model);
           look(2);
           evaluate(model);
         }},
    {.name = "AfterAnEvaluation",
     .between_steps =
         [](const Model& model, const Look& look) {
           evaluate(model);
           look(3);
         }},
    {.name = "BetweenEvaluations",
     .between_steps =
         [](const Model& model, const Look& look) {
           evaluate(model);
           look(3);
           evaluate(model);
           evaluate(model);
         }},
    {.name = "BeforeTheOptimizerAtWhatWasUnshardedForIt",
     .between_steps = [](const Model& model, const Look&) { evaluate(model); },
     .before_optimizer =
         [](const Model& model, const Look& look) {
           auto unit = unsharded(model, 1);
           look(1);
           unit.reshard();
         }},
    {.name = "BetweenForwardAndBackward",
     .before_backward =
         [](const Model&, const Look& look) {
           look(3);
           look(2);
         }},
    {.name = "AtAShardAfterAWriteThroughItsMember",
     .between_steps =
         [](const Model& model, const Look&) {
           const torch::NoGradGuard no_grad;
           model->layers[0]->weight.clamp_(-0.25, 0.25);
           if (rank() == 0) {
             model->layers[0]->parameters()[0].norm();
           }
         }},
    {.name = "AtAUnitThatIsReadInPlace",
     .between_steps =
         [](const Model& model, const Look& look) {
           look(0);
           evaluate(model);
           look(0);
         },
     .before_backward = [](const Model&, const Look& look) { look(0); },
     .before_optimizer = [](const Model&, const Look& look) { look(0); },
     .first_layer_is_in_place = true},
    {.name = "AtAUnitThatIsReadInPlaceBeforeWhichAnotherIsNamed",
     .between_steps = [](const Model&, const Look& look) { look(0); },
     .before_backward = [](const Model&, const Look& look) { look(0); },
     .first_layer_is_in_place = true,
     .first_layer_names_the_third = true}};

enum class Kind { kNone, kRecorded, kUnrecorded };

std::vector<at::Tensor> train(const Program& program, const FullyShardOptions& options, Kind kind) {
  const Model model = make_model();
  for (size_t i = 0; i < model->layers.size(); ++i) {
    FullyShardOptions own = options;
    if (i == 0 && program.first_layer_is_in_place) {
      own.mp_policy = {};
    }
    fully_shard(*model->layers[i], own);
  }
  fully_shard(*model, options);
  if (program.first_layer_names_the_third) {
    as_fsdp(*model->layers[0]).set_modules_to_forward_prefetch({as_fsdp(*model->layers[2])});
  }
  const Look look = [&](int layer) {
    const c10::AutoGradMode records(kind == Kind::kRecorded);
    if (kind != Kind::kNone && rank() == 0) {
      model->layers[layer]->weight.norm();
    }
  };
  torch::optim::SGD optimizer(model->parameters(), 0.125);
  std::vector<at::Tensor> seen;
  program.between_steps(model, look);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto loss = model->forward(subjects::data(rank(), step, {4, 6}));
    seen.push_back(loss.detach());
    program.before_backward(model, look);
    loss.backward();
    program.before_optimizer(model, look);
    optimizer.step();
    program.between_steps(model, look);
  }
  for (const auto& shard : model->parameters()) {
    seen.push_back(sharded(shard).full_tensor());
  }
  return seen;
}

void expect_no_difference(const Program& program, const FullyShardOptions& options) {
  const auto expected = train(program, options, Kind::kNone);
  for (const Kind kind : {Kind::kRecorded, Kind::kUnrecorded}) {
    const auto actual = train(program, options, kind);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(torch::equal(actual[i], expected[i]))
          << "rank " << rank() << ", value " << i << (kind == Kind::kRecorded ? ", recorded" : "");
    }
  }
}

class LookingAlone : public ::testing::TestWithParam<Program> {};
INSTANTIATE_TEST_SUITE_P(Programs, LookingAlone, ::testing::ValuesIn(kPrograms), [](const auto& info) {
  return info.param.name;
});

const FullyShardOptions kCasts{.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}};

TEST_P(LookingAlone, WhereGathersCast) {
  on_threads(2, [] { expect_no_difference(GetParam(), kCasts); });
}

TEST_P(LookingAlone, OverGloo) {
  if (GetParam().first_layer_is_in_place) {
    GTEST_SKIP() << "over Gloo a gather is a collective";
  }
  on_processes(2, [] {
    init({.backend = "gloo", .device = "cpu", .timeout = std::chrono::seconds(30)});
    expect_no_difference(GetParam(), {});
    shutdown();
  });
}

TEST_P(LookingAlone, WhereSomeKeepShares) {
  if (GetParam().first_layer_is_in_place) {
    GTEST_SKIP() << "over Gloo a gather is a collective";
  }
  on_processes(4, [] {
    init({.backend = "gloo", .device = "cpu", .timeout = std::chrono::seconds(30)});
    expect_no_difference(GetParam(), {.reshard_after_forward = 2});
    shutdown();
  });
}

// What a collective writes through a member reaches a shard when that is read; that all ranks write, they know by then.
TEST(LookingAloneAtAShard, AfterACollectiveThroughItsMember) {
  const auto body = [] {
    const Model model = make_model();
    for (auto& layer : model->layers) {
      fully_shard(*layer);
    }
    fully_shard(*model);
    auto& layer = model->layers[1];
    const torch::NoGradGuard no_grad;
    for (const bool broadcasts : {false, true}) {
      const at::Tensor expected = layer->weight.clone() * (broadcasts ? 1 : 2);
      if (broadcasts) {
        world()->broadcast(layer->weight, 1, {"test", ""});
      } else {
        world()->all_reduce(layer->weight, ReduceOp::kSum, 1, {"test", ""})->wait();
      }
      if (rank() == 0) {
        const at::Tensor shard = layer->parameters()[0];
        EXPECT_TRUE(shard.equal(expected.narrow(0, 0, shard.size(0))));
      }
      barrier();
      EXPECT_TRUE(layer->weight.equal(expected));
      as_fsdp(*layer).reshard();
    }
  };
  on_threads(2, body);
  for (const char* backend : {"shm", "gloo"}) {
    on_processes(2, [&] {
      init({.backend = backend, .device = "cpu", .timeout = std::chrono::seconds(30)});
      body();
      shutdown();
    });
  }
}

} // namespace
} // namespace fsdp::testing
