// Summoned parameters are whole and plain, and what is written to them reaches the shards.

#include "comm/decorated_group.h"
#include "engine/bucket.h"
#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "nn/watched.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class Summon : public ::testing::TestWithParam<int> {};

TEST_P(Summon, GivesWholePlainParameters) {
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

TEST_P(Summon, OnTheHostIsWrittenBackUnitByUnit) {
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

TEST_P(Summon, TheEndSaysWhatCouldNotBeWrittenBack) {
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

TEST_P(Summon, ParametersMayBeForgotten) {
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

TEST_P(Summon, AnErrorLeavesEverythingSharded) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    auto first = fully_shard(*model[0]), second = fully_shard(*model[1]); // two roots
    auto loss = model[1]->as<nn::Linear>()->forward(torch::ones({2, 4})).sum();
    std::string said;
    model[1]->as<nn::Linear>()->bias.register_hook(
        [&](const at::Tensor&) { said = error_message([&] { (void)summon_full_params(*model); }); });
    loss.backward();
    EXPECT_TRUE(contains(said, "was called in a backward, which computes with the parameters of")) << said;
    EXPECT_TRUE(is_sharded(model->parameters()[0]));
    EXPECT_EQ(first.unit()->state(), engine::UnitState::kSharded);
    EXPECT_EQ(first.unit()->held, 0);
  });
}

void look_at_all(torch::nn::Module& module, const SummonOptions& options) {
  const auto shards = parameters(module);
  const auto guard = summon_full_params(module, options);
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto shown = module.parameters()[i];
    EXPECT_TRUE(is_sharded(shown) || torch::equal(piece_of(shards[i], shown), shards[i].detach()));
  }
}

// Every forward is followed by a look at all parameters, before its backward.
Trial looks_between(Trial trial, const SummonOptions& options) {
  trial.steps = 3;
  trial.prepare = [options](Subject& subject, FSDPModule&) {
    subject.loss = [module = subject.module, loss = subject.loss, options](int rank, int step) {
      auto result = loss(rank, step);
      look_at_all(*module, options);
      return result;
    };
  };
  return trial;
}

TEST_P(Summon, BetweenAForwardAndItsBackwardChangesNothing) {
  const auto tied = [] { return subjects::tied(); };
  const MixedPrecisionPolicy bf16{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  const std::vector<Trial> trials{
      {.make = subjects::mlp},
      {.make = tied, .options = {.mp_policy = bf16}},
      {.make = subjects::mlp, .options = {.reshard_after_forward = false}, .accumulate = Accumulate::kNoSync},
      {.make = tied, .options = {.mp_policy = bf16, .offload_policy = CPUOffloadPolicy{}}},
      {.make = tied, .options = {.mp_policy = bf16}, .accumulate = Accumulate::kNoSync},
      {.make = subjects::mlp, .flat = fsdp::nn::FlatCut{.alignment = 16}},
  };
  for (const auto& trial : trials) {
    expect_parity(looks_between(trial, {}), GetParam());
    expect_parity(looks_between(trial, {.writeback = false, .rank0_only = true}), GetParam());
    expect_parity(looks_between(trial, {.offload_to_cpu = true}), GetParam());
  }
}

// The guard is between two forwards of one graph.
TEST_P(Summon, BetweenTwoForwardsChangesNothing) {
  Trial trial{.make = [] {
    auto subject = subjects::tied();
    subject.loss = [module = subject.module, loss = subject.loss](int rank, int step) {
      const auto first = loss(rank, step);
      if (is_sharded(module->parameters()[0])) {
        look_at_all(*module, {});
      }
      return first + loss(rank, step + 1);
    };
    return subject;
  }};
  trial.steps = 3;
  trial.options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  expect_parity(trial, GetParam());
}

// As where nothing is sharded: the graph is told of writes, and not of those to `data`.
TEST_P(Summon, GraphsAreToldOfWritesBetweenAForwardAndItsBackward) {
  on_threads(GetParam(), [] {
    for (const bool bf16 : {false, true}) {
      const auto write = [](const at::Tensor& shown, bool to_data) {
        const torch::NoGradGuard no_grad;
        (to_data ? shown.variable_data() : shown).fill_(2);
      };
      nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2)), plain(nn::Linear(5, 3), nn::Linear(3, 2));
      FullyShardOptions options;
      options.mp_policy.param_dtype = bf16 ? std::optional(torch::kBFloat16) : std::nullopt;
      auto root = fully_shard(model, options);
      auto x = torch::ones({2, 5}, torch::requires_grad());
      auto loss = model->forward(x).sum();
      {
        const auto guard = summon_full_params(*model);
        write(model->parameters()[2], /*to_data=*/true);
      }
      loss.backward();
      EXPECT_TRUE(torch::equal(whole_of(*model, "1.weight"), torch::full({2, 3}, 2.0)));
      EXPECT_TRUE(torch::equal(model->parameters()[1].grad(), torch::full_like(model->parameters()[1], 8)));
      loss = model->forward(x).sum();
      {
        const auto guard = summon_full_params(*model);
        write(model->parameters()[2], /*to_data=*/false);
      }
      try {
        loss.backward();
        ADD_FAILURE() << "the graph was not told";
      } catch (const c10::Error& error) {
        EXPECT_TRUE(contains(error.what(), "modified by an inplace operation"));
      }
      root.reset_iter_state();
    }
  });
}

at::Tensor not_exact_in_bfloat16(at::IntArrayRef sizes) {
  return 1 + torch::arange(1, c10::multiply_integers(sizes) + 1, torch::kFloat).view(sizes) / 1000;
}

nn::Sequential in_bfloat16() {
  nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
  torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    parameter.copy_(not_exact_in_bfloat16(parameter.sizes()));
  }
  for (const auto& module : std::vector<nn::Module*>{&*model[0], &*model}) {
    fully_shard(*module, {.mp_policy = {.param_dtype = torch::kBFloat16}});
  }
  return model;
}

// What is shown, and what members say meanwhile, on the calling rank.
void expect_own_dtype(const SummonOptions& options) {
  auto model = in_bfloat16();
  auto& first = *model[0]->as<nn::Linear>();
  const auto view = first.weight.t();
  const auto values = not_exact_in_bfloat16({3, 5});
  {
    const auto guard = summon_full_params(*model, options);
    const auto shown = model->parameters()[0];
    EXPECT_TRUE(torch::equal(shown, values));
    EXPECT_TRUE(torch::equal(first.weight, values));
    torch::NoGradGuard no_grad;
    shown.mul_(1.001);
    EXPECT_TRUE(torch::equal(first.weight, values * 1.001));
    first.weight.add_(1);
    EXPECT_TRUE(torch::equal(shown, values * 1.001 + 1));
    const auto x = torch::ones({2, 5});
    EXPECT_TRUE(torch::equal(first.forward(x), torch::linear(x, shown, first.bias)));
  }
  const auto expected = values * 1.001 + 1;
  EXPECT_TRUE(torch::equal(whole_of(*model, "0.weight"), expected));
  EXPECT_TRUE(torch::equal(first.weight.detach(), expected.to(torch::kBFloat16)));
  EXPECT_TRUE(torch::equal(view.detach().contiguous(), expected.to(torch::kBFloat16).t()));
  EXPECT_TRUE(torch::equal(whole_of(*model, "1.weight"), not_exact_in_bfloat16({2, 3})));
  model->forward(torch::ones({2, 5})).sum().backward();
  EXPECT_EQ(model->parameters()[0].grad().scalar_type(), torch::kFloat);
}

TEST_P(Summon, ShowsParametersInTheirOwnDtype) {
  on_threads(GetParam(), [] {
    expect_own_dtype({});
    expect_own_dtype({.offload_to_cpu = true});
  });
}

TEST(SummonOverGloo, ShowsParametersInTheirOwnDtype) {
  on_processes(3, [] {
    init({.backend = "gloo", .device = "cpu"});
    expect_own_dtype({});
    shutdown();
  });
}

TEST_P(Summon, ALoopThatSwapsAveragesInKeepsTheirDigits) {
  on_threads(GetParam(), [] {
    auto model = in_bfloat16();
    const auto average = not_exact_in_bfloat16({3, 5}) * 0.999;
    for (int round = 0; round < 3; ++round) {
      const auto guard = summon_full_params(*model);
      torch::NoGradGuard no_grad;
      auto shown = model->parameters()[0];
      const auto before = shown.clone();
      shown.copy_(average);
      EXPECT_TRUE(torch::equal(model[0]->as<nn::Linear>()->weight, average));
      shown.copy_(before);
    }
    EXPECT_TRUE(torch::equal(whole_of(*model, "0.weight"), not_exact_in_bfloat16({3, 5})));
  });
}

TEST_P(Summon, AStepWithinAGuardTrainsInTheShownDtype) {
  on_threads(GetParam(), [] {
    auto model = in_bfloat16();
    const auto x = torch::full({2, 5}, 1.001);
    at::Tensor loss;
    {
      const auto guard = summon_full_params(*model, {.writeback = false});
      loss = model->forward(x).sum();
      loss.backward();
    }
    nn::Sequential plain(nn::Linear(5, 3), nn::Linear(3, 2));
    for (auto& item : plain->named_parameters()) {
      item.value().set_data(not_exact_in_bfloat16(item.value().sizes()));
    }
    EXPECT_TRUE(torch::equal(loss, plain->forward(x).sum()));
    EXPECT_TRUE(model->parameters()[0].grad().defined());
    model->forward(x).sum().backward();
  });
}

TEST_P(Summon, RanksThatShowNothingHoldNothing) {
  on_threads(GetParam(), [] {
    for (const bool bf16 : {false, true}) {
      FullyShardOptions options;
      options.mp_policy.param_dtype = bf16 ? std::optional(torch::kBFloat16) : std::nullopt;
      Stack stack(options);
      stack.step([&] {
        const auto guard = summon_full_params(*stack.module, {.writeback = false, .rank0_only = true});
        EXPECT_EQ(is_sharded(stack.module->parameters()[0]), rank() != 0);
      });
      EXPECT_EQ(stack.watched->events().empty(), rank() != 0);
    }
  });
}

TEST_P(Summon, AGuardMayOutliveItsModule) {
  on_threads(GetParam(), [] {
    nn::Linear kept(3, 2);
    std::optional<SummonedParams> guard;
    {
      nn::Sequential model(nn::Linear(5, 3), kept);
      fully_shard(*model[0]);
      fully_shard(*model);
      guard.emplace(summon_full_params(*model));
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        parameter.fill_(3);
      }
    }
    guard->end();
    EXPECT_TRUE(torch::equal(whole_of(*kept, "weight"), torch::full({2, 3}, 3.0)));
  });
}

/// From some moment on, its homes are not to be written.
class ReadOnlyGroup final : public DecoratedGroup {
 public:
  using DecoratedGroup::DecoratedGroup;

  std::shared_ptr<Home> make_home(std::vector<Piece> pieces, const HomeOptions& options, const Label& label) override {
    return std::make_shared<ReadOnlyHome>(base_->make_home(std::move(pieces), options, label), read_only);
  }

  std::shared_ptr<bool> read_only = std::make_shared<bool>(false);

 private:
  struct ReadOnlyHome final : Home {
    ReadOnlyHome(std::shared_ptr<Home> base, std::shared_ptr<bool> read_only)
        : base(std::move(base)), read_only(std::move(read_only)) {}
    void* slice(size_t index) const override {
      return base->slice(index);
    }
    void begin_write(const Label& label) override {
      if (*read_only) {
        throw CommError("a test");
      }
      base->begin_write(label);
    }
    std::unique_ptr<Gathered> gather(const Label& label) override {
      return base->gather(label);
    }
    std::shared_ptr<Home> base;
    std::shared_ptr<bool> read_only;
  };
};

TEST_P(Summon, WhereWritingBackFailsNothingStaysGathered) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    const auto alone = Mesh::from_groups({group_of_one()}, {"shard"}, c10::kCPU);
    auto sharded_first =
        fully_shard(*model[0], {.shard_placement_fn = [&](const at::Tensor& parameter, const std::string&) {
          return ShardPlacement{.mesh = parameter.dim() == 1 ? std::optional(alone) : std::nullopt};
        }});
    auto root = fully_shard(*model);
    auto& unit = *sharded_first.unit();
    ASSERT_EQ(unit.buckets().size(), 2U);
    auto group = std::make_shared<ReadOnlyGroup>(unit.buckets()[0]->shared_shard_group());
    unit.buckets()[0]->gather_group = group;
    unit.buckets()[0]->settle(unit.label("fully_shard"));
    int whole_units = -1;
    unit.runtime().set_observer([&](const engine::Event& event) { whole_units = event.whole_units; });
    const auto weight = model[0]->as<nn::Linear>()->weight;
    const auto fill = [&] {
      torch::NoGradGuard no_grad;
      *group->read_only = true;
      weight.fill_(2);
    };
    const std::vector<std::function<void()>> ways{
        fill, // what it writes reaches the shards at once
        [&] { sharded_first.unshard(), fill(); },
        [&] {
          auto guard = summon_full_params(*model);
          fill(), guard.end();
        }};
    for (const auto& way : ways) {
      EXPECT_THROW(way(), CommError);
      EXPECT_EQ(unit.state(), engine::UnitState::kSharded);
      EXPECT_EQ(unit.whole_bytes(), 0);
      EXPECT_EQ(whole_units, 0);
      EXPECT_TRUE(is_sharded(model->parameters()[0]));
      *group->read_only = false;
      barrier();
      EXPECT_EQ(weight.detach().clone().size(0), 3); // is gathered again
      sharded_first.reshard(), root.reshard();
    }
  });
}

// Of one operator on both.
TEST_P(Summon, WhereWritingBackFailsForOneUnitAnotherHasWhatWasWritten) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    auto fails = fully_shard(*model[0]);
    fully_shard(*model[1]);
    fully_shard(*model);
    auto& unit = *fails.unit();
    auto group = std::make_shared<ReadOnlyGroup>(unit.buckets()[0]->shared_shard_group());
    unit.buckets()[0]->gather_group = group;
    unit.buckets()[0]->settle(unit.label("fully_shard"));
    const auto weight_of = [&](int layer) { return model[static_cast<size_t>(layer)]->as<nn::Linear>()->weight; };
    *group->read_only = true;
    {
      const torch::NoGradGuard no_grad;
      EXPECT_THROW(at::_foreach_zero_({weight_of(0), weight_of(1)}), CommError);
    }
    EXPECT_EQ(unit.state(), engine::UnitState::kSharded);
    const auto shard = model[1]->parameters()[0];
    EXPECT_TRUE(std::all_of(
        shard.data_ptr<float>(), shard.data_ptr<float>() + shard.numel(), [](float value) { return value == 0; }));
    *group->read_only = false;
    barrier();
    EXPECT_TRUE(weight_of(1).eq(0).all().item<bool>());
  });
}

// Else one rank would gather in the next forward what the others have.
TEST_P(Summon, ForOneRankLeavesTheSameUnitsWholeOnAll) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3));
    auto root = fully_shard(model);
    {
      const torch::NoGradGuard no_grad;
      model->forward(torch::ones({2, 5}));
    }
    EXPECT_EQ(root.unit()->state(), engine::UnitState::kWhole);
    summon_full_params(model, {.writeback = false, .rank0_only = true}).end();
    EXPECT_EQ(root.unit()->state(), engine::UnitState::kSharded);
  });
}

// Its writes would be lost with the outer guard's.
TEST_P(Summon, ToWriteWithinAGuardThatDropsWritesIsAnError) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    fully_shard(*model[0]);
    fully_shard(*model);
    for (const bool whole_model : {true, false}) {
      nn::Module& shown = whole_model ? *model : *model[0];
      const auto outer = summon_full_params(shown, {.writeback = false});
      const auto said = error_message([&] { (void)summon_full_params(*model); });
      EXPECT_TRUE(contains(said, "already shown by a guard with writeback = false"));
      const auto inner = summon_full_params(*model, {.writeback = false});
      EXPECT_EQ(model[1]->parameters()[0].size(0), 2);
    }
    {
      const auto outer = summon_full_params(*model, {.writeback = false});
      const auto said = error_message([&] { (void)summon_full_params(*model[1]); }); // of the root's unit
      EXPECT_TRUE(contains(said, "already shown by a guard with writeback = false"));
    }
    const auto outer = summon_full_params(*model[0], {.writeback = false});
    summon_full_params(*model, {.recurse = false}).end(); // another unit
    const auto reading = summon_full_params(*model, {.writeback = false});
  });
}

TEST_P(Summon, AGradientThatIsDroppedThereIsGone) {
  on_threads(GetParam(), [] {
    nn::Linear model(5, 3);
    fully_shard(*model);
    const auto backward = [&] { model->forward(torch::ones({2, 5})).sum().backward(); };
    backward();
    const auto gradient = sharded(model->parameters()[0]).full_grad();
    {
      const auto guard = summon_full_params(*model, {.with_grads = true});
      model->zero_grad();
    }
    backward();
    EXPECT_TRUE(torch::equal(sharded(model->parameters()[0]).full_grad(), gradient));
  });
}

TEST_P(Summon, GradientsChangedInAGuardWithinOneThatShowsOthersOfTheUnit) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    fully_shard(*model);
    model->forward(torch::ones({2, 4})).sum().backward();
    const auto gradient = sharded(model->parameters()[0]).full_grad();
    {
      const auto outer = summon_full_params(*model[0], {.with_grads = true});
      const auto inner = summon_full_params(*model[1], {.with_grads = true});
      model[0]->parameters()[0].mutable_grad().mul_(2);
      model[1]->zero_grad();
    }
    EXPECT_TRUE(torch::equal(sharded(model->parameters()[0]).full_grad(), gradient * 2));
    EXPECT_FALSE(sharded(model->parameters()[2]).full_grad().any().item<bool>());
  });
}

TEST_P(Summon, WhatAGuardWroteStaysWhereAnotherThatReadsEndsAfterIt) {
  on_threads(GetParam(), [] {
    const torch::NoGradGuard no_grad;
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    fully_shard(*model);
    auto writes = summon_full_params(*model[0]);
    auto reads = summon_full_params(*model, {.writeback = false});
    model[0]->as<nn::Linear>()->weight.fill_(2);
    writes.end();
    model[1]->as<nn::Linear>()->weight.fill_(3);
    reads.end();
    EXPECT_TRUE(torch::equal(whole_of(*model, "0.weight"), torch::full({4, 4}, 2.0)));
    EXPECT_FALSE(torch::equal(whole_of(*model, "1.weight"), torch::full({4, 4}, 3.0)));
  });
}

TEST_P(Summon, ToWriteWithinAGuardThatWritesGoesOn) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3));
    fully_shard(model);
    const torch::NoGradGuard no_grad;
    {
      const auto outer = summon_full_params(*model);
      for (const bool writeback : {true, false}) {
        const auto inner = summon_full_params(*model, {.writeback = writeback});
        model->parameters()[0].fill_(writeback ? 2 : 3);
      }
    }
    const auto guard = summon_full_params(*model, {.writeback = false});
    EXPECT_TRUE(model->parameters()[0].eq(3).all().item<bool>()) << "the outer one decides";
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Summon, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
