// One rank alone reads parameters that are whole, where gathers need all ranks: none issues another collective for it.

#include <functional>
#include <mutex>
#include <vector>

#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

nn::Sequential four_layers() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  torch::manual_seed(5);
  nn::Sequential layers;
  for (int i = 0; i < 4; ++i) {
    layers->push_back(nn::Linear(6, 6));
  }
  return layers;
}

void evaluate(nn::Sequential& model) {
  const torch::NoGradGuard no_grad;
  model->forward(torch::ones({2, 6}));
}

FSDPModule unsharded(nn::Sequential& model, int layer) {
  auto unit = as_fsdp(*model[layer]);
  unit.unshard();
  return unit;
}

/// What all ranks do between two steps, and the first one's look.
using Look = std::function<void()>;
struct Between {
  const char* name;
  int layer; ///< that is looked at
  std::function<void(nn::Sequential&, const Look&)> happens;
};

const Between kBetween[] = {
    {"AtWhatWasUnshardedForIt",
     0,
     [](nn::Sequential& model, const Look& look) {
       auto unit = unsharded(model, 0);
       look();
       unit.reshard();
     }},
    {"AtWhatWasUnshardedForTheNextStep",
     0,
     [](nn::Sequential& model, const Look& look) {
       unsharded(model, 0);
       look();
     }},
    {"AtWhatWasUnshardedForTheMidstOfIt",
     2,
     [](nn::Sequential& model, const Look& look) {
       unsharded(model, 2);
       look();
     }},
    {"BetweenEvaluationsAtWhatWasUnsharded",
     2,
     [](nn::Sequential& model, const Look& look) {
       unsharded(model, 2);
       look();
       evaluate(model);
       look();
       evaluate(model);
     }},
    {"AfterAnEvaluation",
     3,
     [](nn::Sequential& model, const Look& look) {
       evaluate(model);
       look();
     }},
    {"BetweenEvaluations", 3, [](nn::Sequential& model, const Look& look) {
       evaluate(model);
       look();
       evaluate(model);
       evaluate(model);
     }}};

enum class Kind { kNone, kRecorded, kUnrecorded };

std::vector<at::Tensor> train(const Between& between, const FullyShardOptions& options, Kind kind) {
  nn::Sequential model = four_layers();
  for (const auto& layer : *model) {
    fully_shard(*layer.ptr(), options);
  }
  fully_shard(*model, options);
  const Look look = [&] {
    const c10::AutoGradMode records(kind == Kind::kRecorded);
    if (kind != Kind::kNone && rank() == 0) {
      model[between.layer]->as<nn::Linear>()->weight.norm();
    }
  };
  torch::optim::SGD optimizer(model->parameters(), 0.125);
  std::vector<at::Tensor> seen;
  between.happens(model, look);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto loss = model->forward(subjects::data(rank(), step, {4, 6})).pow(2).mean();
    seen.push_back(loss.detach());
    loss.backward();
    optimizer.step();
    between.happens(model, look);
  }
  for (const auto& shard : model->parameters()) {
    seen.push_back(sharded(shard).full_tensor());
  }
  return seen;
}

void expect_no_difference(const Between& between, const FullyShardOptions& options) {
  const auto expected = train(between, options, Kind::kNone);
  for (const Kind kind : {Kind::kRecorded, Kind::kUnrecorded}) {
    const auto actual = train(between, options, kind);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(torch::equal(actual[i], expected[i]))
          << "rank " << rank() << ", value " << i << (kind == Kind::kRecorded ? ", recorded" : "");
    }
  }
}

class LookingAlone : public ::testing::TestWithParam<Between> {};
INSTANTIATE_TEST_SUITE_P(Between, LookingAlone, ::testing::ValuesIn(kBetween), [](const auto& info) {
  return info.param.name;
});

TEST_P(LookingAlone, WhereGathersCast) {
  on_threads(2, [] {
    expect_no_difference(GetParam(), {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
  });
}

TEST_P(LookingAlone, OverGloo) {
  on_processes(2, [] {
    init({.backend = "gloo", .device = "cpu", .timeout = std::chrono::seconds(30)});
    expect_no_difference(GetParam(), {});
    shutdown();
  });
}

TEST_P(LookingAlone, WhereSomeKeepShares) {
  on_processes(4, [] {
    init({.backend = "gloo", .device = "cpu", .timeout = std::chrono::seconds(30)});
    expect_no_difference(GetParam(), {.reshard_after_forward = 2});
    shutdown();
  });
}

} // namespace
} // namespace fsdp::testing
