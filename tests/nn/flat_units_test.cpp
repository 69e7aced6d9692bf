// Units whose parameters are cut as one flat parameter: everything else is as with those that are cut one by one.

#include <sstream>

#include "engine/bucket.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"
#include "support/selected.h"

namespace fsdp::testing {
namespace {

using fsdp::nn::FlatCut;
using fsdp::nn::make_unit;

constexpr FlatCut kPacked{.alignment = 1}, kAligned{.alignment = 16};

struct Combination {
  FlatCut flat;
  bool reshard;
  bool bf16;
  bool offload;
  bool hybrid;
  bool frozen;
  Accumulate accumulate;
};

std::string name_of(const Combination& c) {
  std::ostringstream name;
  name << (c.flat.alignment == 1 ? "Packed" : "Aligned") << (c.reshard ? "_Reshard" : "") << (c.bf16 ? "_Bf16" : "")
       << (c.offload ? "_Offload" : "") << (c.hybrid ? "_Hybrid" : "") << (c.frozen ? "_Frozen" : "")
       << std::array{"", "_NoSync", "_NoAllReduce"}[static_cast<int>(c.accumulate)];
  return name.str();
}

std::vector<Combination> all_combinations() {
  std::vector<Combination> all;
  for (const auto& flat : {kPacked, kAligned}) {
    for (int bits = 0; bits < 32; ++bits) {
      for (const auto accumulate : {Accumulate::kNone, Accumulate::kNoSync, Accumulate::kNoAllReduce}) {
        all.push_back(
            {flat, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0, (bits & 16) != 0, accumulate});
      }
    }
  }
  return all;
}

std::vector<Combination> some(const std::vector<Combination>& of, int together) {
  return selected(of, together, [](const Combination& c) -> std::vector<int> {
    const int accumulate = static_cast<int>(c.accumulate);
    return {c.flat.alignment == 1, c.reshard, c.bf16, c.offload, c.hybrid, c.frozen, accumulate};
  });
}

Trial trial_of(const Combination& combination) {
  Trial trial{.make = [frozen = combination.frozen] {
    Subject subject = subjects::tied();
    for (auto& item : subject.module->named_parameters()) {
      item.value().set_requires_grad(!frozen || item.key().find("fc.") == std::string::npos);
    }
    return subject;
  }};
  trial.accumulate = combination.accumulate;
  trial.steps = 3;
  trial.flat = combination.flat;
  trial.options.reshard_after_forward = combination.reshard;
  if (combination.bf16) {
    trial.options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  }
  if (combination.offload) {
    trial.options.offload_policy = CPUOffloadPolicy{};
  }
  return trial;
}

class FlatCombinations : public ::testing::TestWithParam<Combination> {};

TEST_P(FlatCombinations, TrainAsUnsharded) {
  const Trial trial = trial_of(GetParam());
  GetParam().hybrid ? expect_parity_hybrid(trial, {.shards = 2, .replicas = 2}) : expect_parity(trial, 3);
}

INSTANTIATE_TEST_SUITE_P(
    All,
    FlatCombinations,
    ::testing::ValuesIn(some(all_combinations(), /*together=*/4)),
    [](const ::testing::TestParamInfo<Combination>& info) { return name_of(info.param); });

TEST(FlatCombinationsOverGloo, TrainAsUnsharded) {
  const auto body = [] {
    init({.backend = "gloo", .device = "cpu"});
    auto all = all_combinations();
    std::erase_if(all, [](const Combination& c) { return c.hybrid; });
    for (const auto& combination : some(all, /*together=*/3)) {
      SCOPED_TRACE(name_of(combination));
      Trial trial = trial_of(combination);
      trial.steps = 2;
      train_sharded(trial, train_unsharded(trial, {.shards = 2}));
    }
    shutdown();
  };
  on_processes(2, body, {.timeout = std::chrono::minutes(8)});
}

class FlatUnits : public ::testing::TestWithParam<int> {};

TEST_P(FlatUnits, TrainModelsOfEveryKind) {
  for (const auto& flat : {kPacked, kAligned}) {
    for (const auto& make : std::vector<MakeSubject>{
             subjects::mlp,
             [] { return subjects::tied(/*checkpointed=*/true); },
             subjects::convolutions,
             subjects::recurrent}) {
      Trial trial{.make = make, .steps = 3};
      trial.flat = flat;
      expect_parity(trial, GetParam());
    }
  }
}

// 35 elements, a gap of one where each begins at 16 bytes, 7 elements.
TEST_P(FlatUnits, SharesAreEquallyLongAndEndAnywhere) {
  on_threads(GetParam(), [] {
    for (const auto& flat : {kPacked, kAligned}) {
      torch::nn::Linear model(5, 7);
      const auto weight = torch::arange(35, torch::kFloat).view({7, 5}), bias = -torch::arange(7, torch::kFloat);
      {
        torch::NoGradGuard no_grad;
        model->weight.copy_(weight);
        model->bias.copy_(bias);
      }
      make_unit({model.get()}, {}, flat);
      const int64_t gap = flat.alignment == 1 ? 0 : 1, share = (42 + gap + world_size() - 1) / world_size();
      const int64_t begin = rank() * share, end = begin + share;
      const auto part_of = [&](int64_t first, int64_t last) {
        return std::max<int64_t>(0, std::min(end, last) - std::max(begin, first));
      };
      const auto parameters = model->parameters();
      EXPECT_EQ(parameters[0].numel(), part_of(0, 35));
      EXPECT_EQ(parameters[1].numel(), part_of(35 + gap, 42 + gap));
      if (world_size() > 1) {
        EXPECT_EQ(parameters[0].dim(), 1);
        EXPECT_TRUE(parameters[0].equal(weight.flatten().narrow(0, std::min<int64_t>(begin, 35), part_of(0, 35))));
      } else {
        EXPECT_EQ(parameters[0].sizes(), weight.sizes());
      }
      EXPECT_TRUE(sharded(parameters[0]).full_tensor().equal(weight));
      EXPECT_TRUE(sharded(parameters[1]).full_tensor().equal(bias));
    }
  });
}

// Where each begins at 16 bytes, kernels read the shards of all ranks where they lie.
TEST(FlatUnitsInSharedMemory, OnlyWhatBeginsAtOddAddressesIsCopied) {
  on_threads(2, [] {
    for (const auto& flat : {kPacked, kAligned}) {
      torch::nn::Linear model(5, 7);
      const auto unit = make_unit({model.get()}, {}, flat);
      model->forward(torch::ones({1, 5}));
      EXPECT_EQ(unit->whole_bytes(), flat.alignment == 1 ? 7 * 4 : 0);
    }
  });
}

TEST_P(FlatUnits, WritesToWholeParametersReachTheParts) {
  on_threads(GetParam(), [] {
    for (const auto& flat : {kPacked, kAligned}) {
      for (const auto param_dtype : {std::optional<c10::ScalarType>(), std::optional(torch::kBFloat16)}) {
        FullyShardOptions options;
        options.mp_policy.param_dtype = param_dtype;
        torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::Linear(7, 3));
        make_unit({model[0].get()}, options, flat);
        make_unit({model.get()}, options, flat);
        const auto expected = torch::arange(35, torch::kFloat).view({7, 5}) / 8;
        {
          auto guard = summon_full_params(*model);
          torch::NoGradGuard no_grad;
          model->named_parameters()["0.weight"].copy_(expected);
          model->named_parameters()["1.bias"].fill_(2);
        }
        {
          torch::NoGradGuard no_grad;
          model[0]->as<torch::nn::Linear>()->bias.fill_(3); // through a member
        }
        EXPECT_TRUE(whole_of(*model, "0.weight").equal(expected));
        EXPECT_TRUE(whole_of(*model, "0.bias").equal(torch::full({7}, 3.0)));
        EXPECT_TRUE(whole_of(*model, "1.bias").equal(torch::full({3}, 2.0)));
      }
    }
  });
}

TEST_P(FlatUnits, PiecesOfWholesThatDoNotLieInOrderAreThoseOfTheirMemory) {
  on_threads(GetParam(), [] {
    struct Turned : torch::nn::Module {
      Turned() : weight(register_parameter("weight", torch::arange(12, torch::kFloat).view({3, 4}).t())) {}
      torch::Tensor weight;
    } model;
    const auto whole = model.weight.detach().clone();
    make_unit({&model}, {}, kAligned);
    EXPECT_TRUE((model.weight * 1).equal(whole));
    EXPECT_TRUE(sharded(model.parameters()[0]).full_tensor().equal(whole));
    if (world_size() > 1 && rank() == 0) {
      const int64_t mine = model.parameters()[0].numel();
      EXPECT_TRUE(model.parameters()[0].equal(torch::arange(mine, torch::kFloat)));
    }
  });
}

// There is one gradient for all parameters of a unit, or none.
TEST_P(FlatUnits, WhatIsNotUsedOfAUsedUnitHasAGradientOfZeros) {
  on_threads(GetParam(), [] {
    torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::Linear(5, 3));
    make_unit({model[0].get()}, {}, kAligned);
    make_unit({model.get()}, {}, kAligned);
    torch::matmul(torch::ones({1, 5}), model[0]->as<torch::nn::Linear>()->weight.t()).sum().backward();
    const auto named = model->named_parameters();
    EXPECT_TRUE(sharded(named["0.bias"]).full_grad().equal(torch::zeros({7})));
    EXPECT_TRUE(sharded(named["0.weight"]).full_grad().equal(torch::ones({7, 5})));
    EXPECT_FALSE(named["1.weight"].grad().defined());
  });
}

TEST(FlatUnitsErrors, OneDtypeForAll) {
  on_threads(2, [] {
    torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::Linear(7, 3));
    model[1]->to(torch::kDouble);
    const auto message = error_message([&] { make_unit({model.get()}, {}, kAligned); });
    EXPECT_TRUE(contains(message, "Must flatten tensors with uniform dtype but got Float and Double")) << message;
    EXPECT_TRUE(contains(message, "'1.weight'")) << message;
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, FlatUnits, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

} // namespace
} // namespace fsdp::testing
