// A handle is whole to whoever reads it, and a write to it outside a step reaches the shards.

#include <chrono>
#include <functional>
#include <map>
#include <numeric>
#include <thread>

#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/script.h>

#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class Handles : public ::testing::TestWithParam<int> {};

at::Tensor whole_of(const nn::Module& module, const std::string& name) {
  for (const auto& [path, shard] : named_parameters(module)) {
    if (path == name) {
      return sharded(shard).full_tensor();
    }
  }
  throw std::runtime_error("no parameter " + name);
}

TEST_P(Handles, MetadataAndViewsAreNoTouch) {
  on_threads(GetParam(), [] {
    nn::Linear model(6, 4);
    auto unit = fully_shard(*model).unit();
    EXPECT_EQ(model->weight.sizes(), (std::vector<int64_t>{4, 6}));
    EXPECT_EQ(model->weight.t().size(0), 6);
    auto view = model->weight.detach().view({24}).narrow(0, 3, 5);
    EXPECT_EQ(torch::empty_like(model->weight).numel(), 24);
    EXPECT_EQ(unit->state(), engine::UnitState::kSharded);
    EXPECT_EQ(view.clone().numel(), 5); // a read through a view
    EXPECT_EQ(unit->state(), engine::UnitState::kWhole);
  });
}

TEST_P(Handles, AOneRankMayReadAlone) {
  on_threads(GetParam(), [] {
    nn::Linear model(6, 4);
    fully_shard(*model);
    if (rank() == 0) {
      EXPECT_GT(model->weight.norm().item<float>(), 0);
    }
    barrier();
  });
}

TEST_P(Handles, AWriteOutsideAStepReachesTheShards) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    fully_shard(*model[0]);
    fully_shard(*model);
    torch::NoGradGuard no_grad;
    const auto values = torch::arange(15, torch::kFloat).view({3, 5});
    model[0]->as<nn::Linear>()->weight.copy_(values);
    model[0]->as<nn::Linear>()->bias.fill_(3);
    model[1]->as<nn::Linear>()->weight.mul_(0);
    EXPECT_TRUE(torch::equal(whole_of(*model, "0.weight"), values));
    EXPECT_TRUE(torch::equal(whole_of(*model, "0.bias"), torch::full({3}, 3.0)));
    EXPECT_TRUE(torch::equal(whole_of(*model, "1.weight"), torch::zeros({2, 3})));
    EXPECT_TRUE(torch::equal(model[0]->as<nn::Linear>()->weight * 1, values));
  });
}

TEST_P(Handles, ApplyInitializesAShardedModel) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    fully_shard(*model[0]);
    fully_shard(*model);
    model->apply([](nn::Module& module) {
      if (auto* linear = module.as<nn::Linear>()) {
        torch::NoGradGuard no_grad;
        linear->weight.fill_(0.5);
        linear->bias.zero_();
      }
    });
    auto y = model->forward(torch::ones({1, 5}));
    EXPECT_TRUE(torch::equal(y, torch::full({1, 2}, 2.5 * 0.5 * 3)));
  });
}

TEST_P(Handles, ShardsWrittenByUsersAreSeenByTheNextForward) {
  on_threads(GetParam(), [] {
    nn::Linear model(5, 3);
    fully_shard(*model);
    for (int round = 1; round <= 3; ++round) {
      {
        torch::NoGradGuard no_grad;
        for (auto& shard : model->parameters()) {
          shard.fill_(round);
        }
      }
      EXPECT_TRUE(torch::equal(model->forward(torch::ones({1, 5})), torch::full({1, 3}, 6.0 * round)));
    }
  });
}

// Collectives in between end the phase in which all ranks write; the next write has to begin another.
TEST_P(Handles, WritesAfterOtherCollectivesWaitForTheRanksToo) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    fully_shard(*model);
    torch::NoGradGuard no_grad;
    const std::vector<std::function<void()>> between{
        [&] { whole_of(*model, "weight"); },
        [&] {
          if (rank() == 0) {
            model->bias.norm();
          }
          barrier();
        }};
    double value = 1;
    for (int round = 0; round < 6; ++round) {
      const auto write = [&] {
        if (rank() + 1 == world_size()) { // last
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        ++value;
        for (auto& shard : model->parameters()) {
          shard.fill_(value);
        }
      };
      write();
      between[round % 2]();
      write();
      EXPECT_TRUE(torch::equal(model->weight + 0, torch::full({4, 4}, value))) << round;
    }
  });
}

TEST_P(Handles, InferenceModeAndNoGrad) {
  on_threads(GetParam(), [] {
    auto subject = make_seeded({.make = [] { return subjects::tied(); }});
    barrier();
    const float wanted = subject.loss(0, 0).item<float>();
    for (auto& part : subject.parts) {
      fully_shard(*part);
    }
    fully_shard(*subject.module);
    {
      c10::InferenceMode inference;
      EXPECT_EQ(subject.loss(0, 0).item<float>(), wanted);
    }
    torch::NoGradGuard no_grad;
    EXPECT_EQ(subject.loss(0, 0).item<float>(), wanted);
  });
}

TEST_P(Handles, ChangingTheDtypeAfterSharding) {
  on_threads(GetParam(), [] {
    nn::Linear model(5, 3);
    fully_shard(*model);
    model->forward(torch::ones({1, 5})).sum().backward();
    model->zero_grad();
    model->to(torch::kDouble);
    auto loss = model->forward(torch::ones({1, 5}, torch::kDouble)).sum();
    EXPECT_EQ(loss.scalar_type(), torch::kDouble);
    loss.backward();
    for (const auto& shard : model->parameters()) {
      EXPECT_EQ(shard.scalar_type(), torch::kDouble);
      EXPECT_TRUE(is_sharded(shard));
      EXPECT_EQ(shard.grad().scalar_type(), torch::kDouble);
    }
  });
}

TEST_P(Handles, FreezingAfterSharding) {
  on_threads(GetParam(), [] {
    nn::Linear model(5, 3);
    fully_shard(*model);
    for (int round = 0; round < 2; ++round) {
      const bool trainable = round == 1;
      model->named_parameters()["weight"].set_requires_grad(trainable);
      model->zero_grad();
      model->forward(torch::ones({1, 5})).sum().backward();
      EXPECT_EQ(model->named_parameters()["weight"].grad().defined(), trainable);
      EXPECT_TRUE(model->named_parameters()["bias"].grad().defined());
    }
  });
}

TEST_P(Handles, TwoForwardsBeforeOneBackwardAndTwoBackwards) {
  on_threads(GetParam(), [] {
    auto subject = make_seeded({.make = [] { return subjects::tied(); }});
    barrier();
    for (auto& part : subject.parts) {
      fully_shard(*part);
    }
    fully_shard(*subject.module);
    auto gradient = [&] { return sharded(parameters(*subject.module)[0]).full_grad(); };
    (subject.loss(0, 0) + subject.loss(0, 1)).backward();
    const auto together = gradient();
    subject.module->zero_grad();
    auto first = subject.loss(0, 0), second = subject.loss(0, 1);
    first.backward();
    second.backward();
    EXPECT_TRUE(torch::allclose(gradient(), together));
    subject.module->zero_grad();
    auto again = subject.loss(0, 0);
    again.backward({}, /*retain_graph=*/true);
    const auto once = gradient();
    again.backward();
    EXPECT_TRUE(torch::equal(gradient(), once + once));
  });
}

TEST_P(Handles, SummonGivesWholePlainParameters) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    fully_shard(*model[0]);
    fully_shard(*model);
    model->forward(torch::ones({2, 5})).sum().backward();
    const auto gradient = sharded(model->parameters()[0]).full_grad();
    {
      auto guard = summon_full_params(*model, {.with_grads = true});
      for (const auto& item : model->named_parameters()) {
        EXPECT_FALSE(is_sharded(item.value()));
      }
      auto weight = model->named_parameters()["0.weight"];
      EXPECT_EQ(weight.sizes(), (std::vector<int64_t>{3, 5}));
      EXPECT_TRUE(torch::equal(weight.grad(), gradient));
      torch::NoGradGuard no_grad;
      weight.mutable_grad().mul_(3);
      weight.fill_(2);
      EXPECT_TRUE(torch::equal(model[0]->as<nn::Linear>()->weight + 0, torch::full({3, 5}, 2.0)));
    }
    EXPECT_TRUE(is_sharded(model->parameters()[0]));
    EXPECT_TRUE(torch::equal(whole_of(*model, "0.weight"), torch::full({3, 5}, 2.0)));
    EXPECT_TRUE(torch::equal(sharded(model->parameters()[0]).full_grad(), gradient * 3));
    {
      auto guard = summon_full_params(*model, {.writeback = false, .rank0_only = true, .offload_to_cpu = true});
      EXPECT_EQ(is_sharded(model->parameters()[0]), rank() != 0);
      if (rank() == 0) {
        torch::NoGradGuard no_grad;
        model->parameters()[0].fill_(9);
      }
    }
    EXPECT_TRUE(torch::equal(whole_of(*model, "0.weight"), torch::full({3, 5}, 2.0)));
    {
      auto guard = summon_full_params(*model, {.recurse = false});
      EXPECT_TRUE(is_sharded(model->named_parameters()["0.weight"]));
      EXPECT_FALSE(is_sharded(model->named_parameters()["1.weight"]));
    }
  });
}

TEST_P(Handles, SummonedOnTheHostIsWrittenBackUnitByUnit) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2), nn::Linear(2, 2));
    fully_shard(*model[0]);
    fully_shard(*model[1]);
    fully_shard(*model);
    {
      auto guard = summon_full_params(*model, {.offload_to_cpu = true});
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        parameter.fill_(static_cast<double>(parameter.numel()));
      }
    }
    for (const auto& [name, shard] : named_parameters(*model)) {
      const auto whole = sharded(shard).full_tensor();
      EXPECT_TRUE(torch::equal(whole, torch::full_like(whole, static_cast<double>(whole.numel())))) << name;
    }
  });
}

TEST_P(Handles, TheEndOfSummoningSaysWhatCouldNotBeWrittenBack) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    auto first = fully_shard(*model[0]), second = fully_shard(*model[1]);
    auto guard = summon_full_params(*model, {.offload_to_cpu = true});
    {
      torch::NoGradGuard no_grad;
      model->parameters()[0].set_data(torch::zeros({7}));
      model->parameters()[2].fill_(4);
    }
    const auto said = error_message([&] { guard.end(); });
    EXPECT_TRUE(contains(said, "[summon_full_params] 'weight' has shape [7]")) << said;
    EXPECT_EQ(first.unit()->held, 0);
    EXPECT_TRUE(torch::equal(whole_of(*model, "1.weight"), torch::full({2, 3}, 4.0)));
    model->forward(torch::ones({2, 5})).sum().backward();
    guard.end(); // nothing is left to end
  });
}

TEST_P(Handles, SummonedParametersMayBeForgotten) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 3);
    auto unit = fully_shard(*model);
    {
      auto guard = summon_full_params(*model);
      unit.reset_iter_state();
    }
    model->forward(torch::ones({2, 4})).sum().backward();
    EXPECT_EQ(unit.unit()->state(), engine::UnitState::kSharded);
  });
}

TEST_P(Handles, AnErrorWhileSummoningLeavesEverythingSharded) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    auto first = fully_shard(*model[0]), second = fully_shard(*model[1]); // two roots
    auto loss = model[1]->as<nn::Linear>()->forward(torch::ones({2, 4})).sum();
    EXPECT_THROW(summon_full_params(*model), Error);
    EXPECT_TRUE(is_sharded(model->parameters()[0]));
    EXPECT_EQ(first.unit()->state(), engine::UnitState::kSharded);
    EXPECT_EQ(first.unit()->held, 0);
    loss.backward();
  });
}

struct CopyableImpl : nn::Cloneable<CopyableImpl> {
  CopyableImpl() {
    CopyableImpl::reset();
  }
  void reset() override {
    first = register_module("first", nn::Linear(5, 4));
    second = register_module("second", nn::Linear(4, 3));
    uses = register_parameter("uses", torch::zeros({5}, torch::kLong), /*requires_grad=*/false);
    mean = register_buffer("mean", torch::zeros({2}));
    batches = register_buffer("batches", torch::zeros({}, torch::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    return second(torch::tanh(first(x)));
  }
  nn::Linear first{nullptr}, second{nullptr};
  at::Tensor uses, mean, batches;
};

TEST_P(Handles, ACloneHasAsManyRootsAsTheOriginal) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model->first);
    fully_shard(*model->second);
    const auto copy = clone(*model);
    for (const auto& [path, parameter] : named_parameters(*copy)) {
      EXPECT_EQ(is_sharded(parameter), path != "uses") << path;
    }
  });
}

TEST_P(Handles, CloneIsAShardedCopyWithItsOwnShards) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model->first);
    fully_shard(*model, {.reshard_after_forward = true});
    model->named_parameters()["first.bias"].set_requires_grad(false);
    auto copy = fsdp::clone(model);
    EXPECT_TRUE(is_fsdp(*copy->first));
    EXPECT_FALSE(copy->named_parameters()["first.bias"].requires_grad());
    EXPECT_EQ(describe(*copy).str(), describe(*model).str()); // unit by unit
    const auto x = torch::ones({2, 5});
    EXPECT_TRUE(torch::equal(copy->forward(x), model->forward(x)));
    {
      torch::NoGradGuard no_grad;
      for (auto& shard : model->parameters()) {
        shard.fill_(1);
      }
      for (auto& shard : copy->parameters()) {
        shard.fill_(0);
      }
      model->mean.fill_(1);
      model->batches.fill_(7);
    }
    ema_update_(*copy, *model, 0.75);
    EXPECT_TRUE(torch::equal(whole_of(*copy, "uses"), torch::ones({5}, torch::kLong))); // counts have no average
    EXPECT_TRUE(torch::equal(copy->mean, torch::ones({2})));
    EXPECT_EQ(copy->batches.item<int64_t>(), 7);
    EXPECT_TRUE(torch::equal(whole_of(*copy, "second.weight"), torch::full({3, 4}, 0.25)));
    EXPECT_TRUE(torch::equal(whole_of(*model, "second.weight"), torch::ones({3, 4})));
  });
}

TEST_P(Handles, ACloneTrainsAsTheOriginal) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model->first);
    fully_shard(*model);
    const auto copy = fsdp::clone(model);
    const auto train = [](CopyableImpl& module) {
      torch::optim::AdamW optimizer(parameters(module), torch::optim::AdamWOptions(1e-2));
      std::vector<float> losses;
      for (int step = 0; step < 10; ++step) {
        optimizer.zero_grad();
        const auto loss = module.forward(subjects::data(rank(), step, {2, 5})).pow(2).mean();
        loss.backward();
        losses.push_back(loss.item<float>());
        optimizer.step();
      }
      return losses;
    };
    EXPECT_EQ(train(*copy), train(*model));
    for (const char* name : {"first.weight", "second.bias"}) {
      EXPECT_TRUE(torch::equal(whole_of(*copy, name), whole_of(*model, name))) << name;
    }
  });
}

TEST_P(Handles, ACloneExchangesAsTheOriginal) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    auto inner = fully_shard(*model->first);
    fully_shard(*model);
    int gathers = 0, reductions = 0;
    inner.set_custom_all_gather([&](at::Tensor& output, const at::Tensor& input, Group& group) {
      ++gathers;
      output.copy_(input.repeat({group.size()}));
    });
    inner.set_custom_reduce_scatter([&](at::Tensor& output, const at::Tensor& input, Group&) {
      ++reductions;
      output.copy_(input.narrow(0, 0, output.numel()));
    });
    const auto copy = fsdp::clone(model);
    gathers = reductions = 0;
    copy->forward(torch::ones({2, 5})).sum().backward();
    EXPECT_EQ(gathers, 1);
    EXPECT_EQ(reductions, 1);
  });
}

TEST_P(Handles, AHandlesGradientThatWasGivenOtherData) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 3);
    const at::Tensor handle = model->weight;
    fully_shard(*model);
    const auto step = [&] {
      model->zero_grad();
      model->forward(torch::ones({2, 4})).sum().backward();
      return model->parameters()[0].grad().clone();
    };
    const auto expected = step();
    handle.mutable_grad().set_data(torch::ones({3, 4}));
    EXPECT_TRUE(torch::equal(step(), expected));
    handle.mutable_grad().set_data(torch::ones({3, 4}));
  });
}

TEST_P(Handles, CloneLeavesAloneWhatTheOriginalLeftAlone) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model->first, {.ignored_params = {model->first->bias}});
    fully_shard(*model, {.ignored_params = {model->second->bias}});
    auto copy = fsdp::clone(model);
    EXPECT_EQ(describe(*copy).str(), describe(*model).str());
    EXPECT_FALSE(is_sharded(copy->second->bias));
    ema_update_(*copy, *model, 0.5);
  });
}

TEST_P(Handles, AnIndexIsSeenBehindMissingOnes) {
  on_threads(GetParam(), [] {
    nn::ParameterList model;
    const auto index = torch::tensor({2, 0, 1});
    model->append(index.clone().set_requires_grad(false));
    model->append(torch::ones({3}));
    fully_shard(*model);
    const auto x = torch::arange(12, torch::kFloat).view({4, 3});
    const c10::List<std::optional<at::Tensor>> indices({std::nullopt, model[0]});
    EXPECT_TRUE(torch::equal(at::index(x, indices), x.index_select(1, index)));
  });
}

// The second unit is gathered ahead while the first is about to be read; new data behind its shards makes every reader
// let go of the group's memory, the first unit included.
TEST_P(Handles, APrefetchThatMovesShardsLeavesTheTouchedUnitWhole) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4), nn::Linear(4, 4));
    for (const auto& layer : *model) {
      fully_shard(*layer.ptr());
    }
    fully_shard(*model);
    const auto x = torch::ones({2, 4});
    for (int step = 0; step < 3; ++step) { // the schedule is learned
      model->forward(x).sum().backward();
    }
    for (int64_t moved = 0; moved < 3; ++moved) {
      torch::NoGradGuard no_grad;
      const auto expected = model->forward(x);
      for (auto& shard : model[moved]->parameters()) {
        shard.set_data(shard.clone());
      }
      torch::AutoGradMode grad(true);
      const auto out = model->forward(x);
      EXPECT_TRUE(torch::equal(out, expected)) << moved;
      out.sum().backward();
    }
  });
}

TEST_P(Handles, TorchScriptModulesTrain) {
  const auto file = std::filesystem::temp_directory_path() / ("fsdp_script_" + std::to_string(getpid()) + ".pt");
  {
    torch::jit::Module features("Features"), module("Net");
    torch::manual_seed(0);
    const auto parameter = [](torch::jit::Module& of, const char* name, at::IntArrayRef sizes) {
      of.register_parameter(name, torch::randn(sizes).requires_grad_(), /*is_buffer=*/false);
    };
    parameter(features, "weight", {2, 1, 3});
    parameter(features, "scale", {2});
    parameter(features, "shift", {2});
    features.register_buffer("mean", torch::zeros({2}));
    features.register_buffer("var", torch::ones({2}));
    features.define(R"(
def forward(self, x):
  y = torch.conv1d(x.unsqueeze(1), self.weight, None, [1], [1])
  y = torch.batch_norm(y, self.scale, self.shift, self.mean, self.var, True, 0.1, 1e-5, False)
  return torch.relu(y).mean(1)
)");
    parameter(module, "weight", {3, 5});
    parameter(module, "bias", {3});
    module.register_module("features", features);
    module.define(R"(
def forward(self, x):
  return torch.tanh(torch.matmul(self.features.forward(x), self.weight.t()) + self.bias)
)");
    module.save(file.string());
  }
  struct Trained {
    std::map<int, std::vector<float>> losses; // by rank
    std::vector<at::Tensor> wholes;
  };
  auto train = [&](const std::vector<int>& ranks, bool sharded_run) {
    // The optimizer of graphs takes other formulas from the third call on: the runs call a different number of times.
    const torch::jit::GraphOptimizerEnabledGuard as_written(false);
    auto module = torch::jit::load(file.string());
    if (sharded_run) {
      auto features = module.attr("features").toModule();
      fully_shard(features);
      fully_shard(module);
      EXPECT_EQ(named_parameters(module).size(), 5u);
      EXPECT_EQ(named_parameters(module)[0].first, "weight");
    }
    const auto shards = parameters(module);
    torch::optim::AdamW optimizer(shards, torch::optim::AdamWOptions(1e-2));
    Trained trained;
    for (int step = 0; step < 10; ++step) {
      std::vector<at::Tensor> sums(shards.size());
      for (const int rank : ranks) {
        optimizer.zero_grad();
        const auto loss = module.forward({subjects::data(rank, step, {2, 5})}).toTensor().pow(2).mean();
        loss.backward();
        trained.losses[rank].push_back(loss.item<float>());
        for (size_t i = 0; i < shards.size(); ++i) {
          sums[i] = plus(sums[i], shards[i].grad());
        }
      }
      for (size_t i = 0; i < shards.size() && !sharded_run; ++i) {
        shards[i].mutable_grad() = sums[i] / static_cast<int64_t>(ranks.size());
      }
      optimizer.step();
    }
    for (const auto& shard : shards) {
      trained.wholes.push_back(sharded_run ? sharded(shard).full_tensor() : shard.detach());
    }
    return trained;
  };
  std::vector<int> all(GetParam());
  std::iota(all.begin(), all.end(), 0);
  const auto wanted = train(all, false);
  on_threads(GetParam(), [&] {
    const auto got = train({rank()}, true);
    EXPECT_EQ(got.losses.at(rank()), wanted.losses.at(rank()));
    for (size_t i = 0; i < got.wholes.size(); ++i) {
      EXPECT_TRUE(torch::equal(got.wholes[i], wanted.wholes[i])) << i;
    }
  });
  std::filesystem::remove(file);
}

TEST_P(Handles, TorchScriptModulesBecomeSeveralUnits) {
  on_threads(GetParam(), [] {
    torch::jit::Module inner("Inner"), outer("Outer");
    inner.register_parameter("weight", torch::ones({3, 3}).requires_grad_(), /*is_buffer=*/false);
    inner.define("def forward(self, x):\n  return torch.tanh(torch.matmul(x, self.weight))\n");
    outer.register_parameter("scale", torch::ones({3}).requires_grad_(), /*is_buffer=*/false);
    outer.register_module("inner", inner);
    outer.define("def forward(self, x):\n  return self.inner.forward(x * self.scale)\n");
    auto below = fully_shard(inner);
    auto root = fully_shard(outer);
    EXPECT_EQ(below.name(), "inner");
    EXPECT_EQ(below.unit()->shared_runtime(), root.unit()->shared_runtime());
    outer.forward({torch::ones({2, 3})}).toTensor().sum().backward();
    EXPECT_EQ(below.unit()->whole_bytes() + root.unit()->whole_bytes(), 0);
    for (const auto& shard : parameters(outer)) {
      EXPECT_TRUE(shard.numel() == 0 || shard.grad().defined());
    }
    EXPECT_THROW(fully_shard(outer), Error);
  });
}

TEST_P(Handles, DescribeListsTheUnits) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    fully_shard(*model[0], {.mp_policy = {.param_dtype = torch::kBFloat16}});
    fully_shard(*model);
    const auto description = describe(*model);
    ASSERT_EQ(description.units.size(), 2u);
    EXPECT_EQ(description.units[0].name, "0");
    EXPECT_EQ(description.units[0].numel, 18);
    EXPECT_EQ(description.units[0].dtype, "float32 -> bfloat16");
    EXPECT_EQ(description.units[0].bytes_whole, 36);
    EXPECT_EQ(description.units[0].policy, "reshard");
    EXPECT_EQ(description.units[1].name, "(root)");
    EXPECT_EQ(description.units[1].policy, "keep");
    EXPECT_NE(description.str().find("This rank keeps"), std::string::npos);
    EXPECT_EQ(description.units[1].parameters, 2);
    const Mesh mesh = default_mesh();
    for (const auto& unit : description.units) {
      EXPECT_EQ(unit.mesh, mesh.str());
    }
    int64_t bytes_of_shards = 0;
    for (const auto& shard : model->parameters()) {
      bytes_of_shards += static_cast<int64_t>(shard.nbytes());
    }
    EXPECT_EQ(description.units[0].bytes_shard + description.units[1].bytes_shard, bytes_of_shards);
    EXPECT_EQ(description.bytes_shard, bytes_of_shards);
    // Shards and their gradients, and at the least one unit that passes.
    EXPECT_GE(description.bytes_peak, 2 * bytes_of_shards + (world_size() == 1 ? 0 : 36));
  });
}

TEST_P(Handles, DescribeShowsWhatUnitsAreKeptAs) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2), nn::Linear(2, 2));
    fully_shard(*model[0], {.reshard_after_forward = world_size()});
    fully_shard(*model[1], {.reshard_after_forward = false, .offload_policy = CPUOffloadPolicy{}});
    fully_shard(*model[2], {.reshard_after_forward = 1});
    std::vector<std::string> policies;
    const auto description = describe(*model);
    for (const auto& unit : description.units) {
      policies.push_back(unit.policy);
      EXPECT_NE(description.str().find(unit.policy), std::string::npos);
    }
    const auto among_all = "reshard to " + std::to_string(world_size());
    EXPECT_EQ(policies, (std::vector<std::string>{among_all, "keep, offload", "reshard to 1"}));
  });
}

TEST_P(Handles, AShardKnowsTheWhole) {
  on_threads(GetParam(), [] {
    nn::Linear model(nn::LinearOptions(6, 5).bias(false));
    model->weight.set_data(torch::arange(30, torch::kDouble).view({6, 5}).t());
    const auto original = model->weight.detach().clone();
    const int ranks = world_size();
    const int replicas = ranks % 2 == 0 ? 2 : 1;
    const Mesh mesh = init_device_mesh("cpu", {replicas, ranks / replicas}, {"replicate", "shard"});
    fully_shard(*model, {.mesh = mesh, .shard_placement_fn = [](const at::Tensor&, const std::string&) {
                           return ShardPlacement{.dim = 1};
                         }});
    const auto weight = sharded(model->parameters()[0]);
    EXPECT_EQ(weight.name, "weight");
    EXPECT_EQ(weight.sizes, (std::vector<int64_t>{5, 6}));
    EXPECT_EQ(weight.strides, (std::vector<int64_t>{1, 5}));
    EXPECT_EQ(weight.dtype(), torch::kDouble);
    EXPECT_EQ(weight.numel(), 30);
    EXPECT_TRUE(weight.mesh == mesh);
    ASSERT_EQ(weight.placements.size(), 2u);
    EXPECT_TRUE(weight.placements[0].is_replicate());
    EXPECT_EQ(weight.placements[1].shard_dim, 1);
    EXPECT_TRUE(torch::equal(weight.full_tensor(), original));
    EXPECT_TRUE(torch::equal(weight.local, piece_of(weight.local, original)));
  });
}

struct EncoderImpl : nn::Module {
  EncoderImpl() : linear(register_module("linear", nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    seen = x.scalar_type();
    return linear(x);
  }
  at::Tensor encode(const at::Tensor& x) {
    return forward(x);
  }
  nn::Linear linear;
  c10::ScalarType seen = torch::kFloat;
};
FSDP_MODULE(Encoder);

TEST_P(Handles, BoundariesCast) {
  on_threads(GetParam(), [] {
    Encoder model;
    const auto x = torch::ones({2, 4});
    fully_shard(*model, {.mp_policy = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kDouble}});
    EXPECT_EQ(model(x).scalar_type(), torch::kDouble);
    EXPECT_EQ(model->seen, torch::kBFloat16);
    EXPECT_EQ(
        model->forward(x).scalar_type(), torch::kBFloat16); // no boundary, but matrix products take what they are given
    EXPECT_EQ(model->seen, torch::kFloat);
    EXPECT_EQ(call_method(model, "encode", &EncoderImpl::encode, x).scalar_type(), torch::kBFloat16);
    register_fsdp_forward_method(*model, "encode");
    EXPECT_EQ(call_method(model, "encode", &EncoderImpl::encode, x).scalar_type(), torch::kDouble);
  });
}

TEST_P(Handles, EverythingIsFreedWithTheModel) {
  on_threads(GetParam(), [] {
    std::weak_ptr<engine::Unit> root, part;
    {
      nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
      part = fully_shard(*model[0]).unit();
      root = fully_shard(*model).unit();
      torch::optim::AdamW optimizer(model->parameters());
      model->forward(torch::ones({2, 5})).sum().backward();
      optimizer.step();
      EXPECT_FALSE(part.expired());
    }
    EXPECT_TRUE(part.expired());
    EXPECT_TRUE(root.expired());
    {
      nn::Sequential model(nn::Linear(5, 3));
      part = fully_shard(*model[0]).unit();
      root = fully_shard(*model).unit(); // without parameters of its own
    }
    EXPECT_TRUE(part.expired());
    EXPECT_TRUE(root.expired());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Handles, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
