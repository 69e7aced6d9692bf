// A flat parameter that users see: this rank's share of all parameters of a unit, padding and gaps included.

#include <cstddef>
#include <memory>
#include <sstream>

#include "engine/flat_shard.h"
#include "fsdp1/train.h"
#include "nn/hidden_parameters.h"
#include "support/error_message.h"
#include "support/selected.h"

namespace fsdp::testing {
namespace {

using nn::FlatCut;

struct Combination {
  bool reshard, bf16, offload, hybrid, aligned;
  Accumulate accumulate;
};

std::string name_of(const Combination& c) {
  std::ostringstream name;
  name << (c.aligned ? "Aligned" : "Packed") << (c.reshard ? "_Reshard" : "") << (c.bf16 ? "_Bf16" : "")
       << (c.offload ? "_Offload" : "") << (c.hybrid ? "_Hybrid" : "")
       << std::array{"", "_NoSync", "_NoAllReduce"}[static_cast<int>(c.accumulate)];
  return name.str();
}

std::vector<Combination> all_combinations() {
  std::vector<Combination> all;
  for (int bits = 0; bits < 32; ++bits) {
    for (const auto accumulate : {Accumulate::kNone, Accumulate::kNoSync}) {
      const auto bit = [bits](int n) { return (bits >> n & 1) != 0; };
      all.push_back({bit(0), bit(1), bit(2), bit(3), bit(4), accumulate});
    }
  }
  return all;
}

/// Those in which any three options meet in every way.
std::vector<Combination> some(const std::vector<Combination>& of) {
  return selected(of, /*together=*/3, [](const Combination& c) -> std::vector<int> {
    return {c.aligned, c.reshard, c.bf16, c.offload, c.hybrid, static_cast<int>(c.accumulate)};
  });
}

FSDPModule shard_as_one(Subject& subject, const Trial& trial) {
  for (auto& part : subject.parts) {
    nn::make_unit({part.get()}, trial.options, trial.flat);
  }
  return FSDPModule(nn::make_unit({subject.module.get()}, trial.options, trial.flat));
}

Trial trial_of(const Combination& combination) {
  Trial trial{.make = [] { return subjects::tied(); }};
  trial.steps = 3;
  trial.accumulate = combination.accumulate;
  trial.flat = FlatCut{.alignment = combination.aligned ? 16 : 1, .shown_as_one = true};
  trial.options.reshard_after_forward = combination.reshard;
  if (combination.bf16) {
    trial.options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  }
  if (combination.offload) {
    trial.options.offload_policy = CPUOffloadPolicy{};
  }
  return trial;
}

// `train_wrapped` asks instances for no_sync: here units are made without them.
void train_shown(Trial trial, const Reference& reference) {
  const bool accumulates = trial.accumulate == Accumulate::kNoSync;
  train_wrapped(trial, reference, [&, accumulates](Subject& subject) {
    auto root = shard_as_one(subject, trial);
    if (accumulates) {
      const auto loss = subject.loss;
      subject.loss = [loss, root, calls = 0](int rank, int step) mutable {
        root.set_requires_gradient_sync(++calls % 3 == 0);
        return loss(rank, step);
      };
    }
    return root;
  });
}

class FlatShardCombinations : public ::testing::TestWithParam<Combination> {};

TEST_P(FlatShardCombinations, TrainAsUnsharded) {
  const Trial trial = trial_of(GetParam());
  const Arrangement arrangement =
      GetParam().hybrid ? Arrangement{.shards = 2, .replicas = 2} : Arrangement{.shards = 3};
  const auto reference = train_unsharded(trial, arrangement);
  on_threads(arrangement.ranks(), [&] {
    Trial mine = trial;
    if (GetParam().hybrid) {
      mine.options.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    }
    train_shown(mine, reference);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All,
    FlatShardCombinations,
    ::testing::ValuesIn(some(all_combinations())),
    [](const ::testing::TestParamInfo<Combination>& info) { return name_of(info.param); });

class FlatShards : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, FlatShards, ::testing::Values(1, 2, 3, 4));

TEST_P(FlatShards, TrainModelsOfEveryKind) {
  for (const auto& make : std::vector<MakeSubject>{subjects::mlp, subjects::convolutions, subjects::recurrent}) {
    Trial trial{.make = make, .steps = 3};
    trial.flat = FlatCut{.alignment = 1, .shown_as_one = true};
    const auto reference = train_unsharded(trial, {.shards = GetParam()});
    on_threads(GetParam(), [&] { train_shown(trial, reference); });
  }
}

TEST(FlatShardsOverGloo, TrainAsUnsharded) {
  on_processes(2, [] {
    init({.backend = "gloo", .device = "cpu"});
    for (const auto& combination : all_combinations()) {
      if (!combination.hybrid && !combination.aligned) {
        SCOPED_TRACE(name_of(combination));
        const Trial trial = trial_of(combination);
        train_shown(trial, train_unsharded(trial, {.shards = 2}));
      }
    }
    shutdown();
  });
}

std::shared_ptr<engine::Unit> as_one(torch::nn::Module& module, int64_t alignment = 1) {
  return nn::make_unit({&module}, {}, FlatCut{.alignment = alignment, .shown_as_one = true});
}

TEST_P(FlatShards, AreAllThatIsRegistered) {
  on_threads(GetParam(), [] {
    torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::Linear(7, 2));
    as_one(*model[0]);
    as_one(*model);
    const auto named = model->named_parameters();
    ASSERT_EQ(named.size(), 2);
    EXPECT_EQ(named[0].key(), "_flat_param");
    EXPECT_EQ(named[1].key(), "0._flat_param");
    EXPECT_EQ(named[0].value().numel(), (16 + world_size() - 1) / world_size());
    EXPECT_EQ(named[1].value().numel(), (42 + world_size() - 1) / world_size());
    EXPECT_TRUE(named[0].value().requires_grad());
    EXPECT_EQ(fsdp::named_parameters(model).size(), 2);
    EXPECT_EQ(model[0]->as<torch::nn::Linear>()->weight.sizes(), torch::IntArrayRef({7, 5}));
  });
}

TEST_P(FlatShards, HoldTheParametersOneAfterAnotherAndZeros) {
  on_threads(GetParam(), [] {
    torch::nn::Linear model(5, 7);
    const auto weight = torch::arange(1, 36, torch::kFloat).view({7, 5}), bias = -torch::arange(1, 8, torch::kFloat);
    {
      torch::NoGradGuard no_grad;
      model->weight.copy_(weight);
      model->bias.copy_(bias);
    }
    as_one(*model, /*alignment=*/16);
    const int64_t share = (43 + world_size() - 1) / world_size();
    const auto padding = torch::zeros({share * world_size() - 43});
    const auto whole = torch::cat({weight.flatten(), torch::zeros({1}), bias, padding});
    const auto flat = model->parameters()[0];
    EXPECT_TRUE(flat.equal(whole.narrow(0, rank() * share, share)));
    EXPECT_TRUE(sharded(flat).full_tensor().equal(whole));
    EXPECT_EQ(sharded(flat).sizes, std::vector<int64_t>{share * world_size()});
    EXPECT_TRUE(is_sharded(flat));
  });
}

TEST_P(FlatShards, GradientsAreZeroInPaddingAndWhereNoneCame) {
  on_threads(GetParam(), [] {
    torch::nn::Sequential model(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
    as_one(*model);
    const auto flat = model->parameters()[0];
    model[0]->as<torch::nn::Linear>()->forward(torch::ones({1, 3})).sum().backward(); // the other's get none
    ASSERT_TRUE(flat.grad().defined());
    EXPECT_EQ(flat.grad().sizes(), flat.sizes());
    const auto whole = sharded(flat).full_grad();
    EXPECT_TRUE(whole.narrow(0, 0, 12).equal(torch::ones({12})));
    EXPECT_EQ(whole.narrow(0, 12, whole.numel() - 12).count_nonzero().item<int64_t>(), 0);
    model->zero_grad();
    EXPECT_FALSE(flat.grad().defined());
  });
}

TEST_P(FlatShards, GradientsAreZeroBetweenParametersAndAfterThem) {
  on_threads(GetParam(), [] {
    torch::nn::Linear model(5, 7); // 35 elements, a gap of one, 7
    as_one(*model, /*alignment=*/16);
    const auto flat = model->parameters()[0];
    for (int step = 0; step < 20; ++step) {
      std::vector<at::Tensor> memory; // that will be used again, and is not zero
      for (int i = 0; i < 8; ++i) {
        memory.push_back(torch::full(flat.sizes(), 7.0));
      }
      memory.clear();
      model->zero_grad();
      model->forward(torch::ones({1, 5})).sum().backward();
      for (int64_t i = 0; i < flat.numel(); ++i) {
        const int64_t element = rank() * flat.numel() + i;
        const bool of_a_parameter = element < 35 || (element >= 36 && element < 43);
        ASSERT_EQ(flat.grad()[i].item<float>(), of_a_parameter ? 1 : 0) << element;
      }
    }
  });
}

TEST_P(FlatShards, OfUnitsThatNobodyUsedHaveNoGradient) {
  on_threads(GetParam(), [] {
    torch::nn::Sequential model(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
    as_one(*model[0]);
    as_one(*model[1]);
    as_one(*model);
    model[0]->as<torch::nn::Linear>()->forward(torch::ones({1, 3})).sum().backward();
    const auto named = model->named_parameters();
    EXPECT_TRUE(named["0._flat_param"].grad().defined());
    EXPECT_FALSE(named["1._flat_param"].grad().defined());
  });
}

TEST_P(FlatShards, TakeWhatIsWrittenToThem) {
  on_threads(GetParam(), [] {
    torch::nn::Linear model(3, 2);
    as_one(*model);
    const auto before = model->forward(torch::ones({1, 3})).detach().clone();
    torch::NoGradGuard no_grad;
    model->parameters()[0].mul_(2);
    barrier();
    EXPECT_TRUE(model->forward(torch::ones({1, 3})).equal(before * 2));
  });
}

TEST_P(FlatShards, MoveToOtherDtypesWithTheirModule) {
  on_threads(GetParam(), [] {
    torch::nn::Linear model(3, 2);
    as_one(*model);
    const auto before = model->forward(torch::ones({1, 3})).detach().clone();
    model->to(torch::kDouble);
    EXPECT_TRUE(
        torch::allclose(model->forward(torch::ones({1, 3}, torch::kDouble)).detach(), before.to(torch::kDouble)));
    EXPECT_EQ(model->parameters()[0].scalar_type(), torch::kDouble);
    EXPECT_EQ(model->weight.scalar_type(), torch::kDouble);
    model->forward(torch::ones({1, 3}, torch::kDouble)).sum().backward();
    EXPECT_EQ(model->parameters()[0].grad().scalar_type(), torch::kDouble);
    barrier();
    torch::NoGradGuard no_grad;
    model->parameters()[0].fill_(1);
    barrier();
    EXPECT_TRUE(model->forward(torch::ones({1, 3}, torch::kDouble)).equal(torch::full({1, 2}, 4.0, torch::kDouble)));
  });
}

TEST(FlatShardErrors, DataOfAnotherSizeIsRefused) {
  on_threads(2, [] {
    torch::nn::Linear model(3, 2);
    as_one(*model);
    model->parameters()[0].set_data(torch::zeros({7}));
    EXPECT_TRUE(contains(
        error_message([&] {
          model->forward(torch::ones({1, 3}));
        }),
        "the 4 elements of this rank's share are needed"));
  });
}

TEST(FlatShardErrors, SavingIsRefused) {
  on_threads(2, [] {
    torch::nn::Linear model(3, 2);
    as_one(*model);
    std::ostringstream out;
    EXPECT_TRUE(contains(error_message([&] { torch::save(model, out); }), "[torch::save]"));
  });
}

TEST_P(FlatShards, GiveWayToWholeParametersInAGuard) {
  on_threads(GetParam(), [] {
    torch::nn::Sequential model(torch::nn::Linear(torch::nn::LinearOptions(1, 1).bias(false)), torch::nn::Linear(5, 7));
    as_one(*model[0]);
    as_one(*model);
    {
      const auto guard = fsdp::summon_full_params(model);
      const auto named = model->named_parameters();
      ASSERT_EQ(named.size(), 3);
      EXPECT_EQ(named["0.weight"].sizes(), torch::IntArrayRef({1, 1}));
      EXPECT_EQ(named["1.weight"].sizes(), torch::IntArrayRef({7, 5}));
      torch::NoGradGuard no_grad;
      for (auto& item : model->named_parameters()) {
        item.value().fill_(3);
      }
    }
    const auto named = model->named_parameters();
    ASSERT_EQ(named.size(), 2);
    // One element on several ranks: the others hold padding, which nothing is written to.
    EXPECT_TRUE(named["0._flat_param"].equal(torch::full({1}, rank() == 0 ? 3.0 : 0.0)));
    EXPECT_TRUE(sharded(named["_flat_param"]).full_tensor().narrow(0, 0, 42).equal(torch::full({42}, 3.0)));
    EXPECT_TRUE((model[1]->as<torch::nn::Linear>()->weight * 1).equal(torch::full({7, 5}, 3.0)));
  });
}

TEST_P(FlatShards, StateDictsHaveTheParametersUnderTheirOwnNames) {
  on_threads(GetParam(), [] {
    torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::Linear(7, 2));
    StateDict wanted;
    for (const auto& item : model->named_parameters()) {
      torch::NoGradGuard no_grad;
      item.value().copy_(torch::arange(item.value().numel()).view(item.value().sizes()) + 1);
      wanted.insert(item.key(), item.value().detach().clone());
    }
    as_one(*model[0]);
    as_one(*model);
    const auto state = full_state_dict(model);
    ASSERT_EQ(state.keys(), wanted.keys());
    for (const auto& item : wanted) {
      EXPECT_TRUE(state[item.key()].equal(item.value())) << item.key();
    }
    barrier();
    {
      torch::NoGradGuard no_grad;
      for (auto& flat : model->parameters()) {
        flat.zero_();
      }
    }
    load_state_dict(model, state);
    EXPECT_TRUE((model[0]->as<torch::nn::Linear>()->weight * 1).equal(wanted["0.weight"]));
    const auto pieces = sharded_state_dict(model);
    ASSERT_EQ(pieces.keys(), wanted.keys());
    load_state_dict(model, pieces);
    EXPECT_TRUE((model[1]->as<torch::nn::Linear>()->bias * 1).equal(wanted["1.bias"]));
  });
}

TEST_P(FlatShards, ClipByTheNormOfTheWholeGradient) {
  on_threads(GetParam(), [] {
    torch::nn::Linear model(5, 7);
    as_one(*model);
    model->forward(torch::ones({1, 5})).sum().backward();
    const auto norm = fsdp::clip_grad_norm_(model, 1.0);
    EXPECT_FLOAT_EQ(norm.item<float>(), std::sqrt(42.0F));
    EXPECT_NEAR(sharded(model->parameters()[0]).full_grad().norm().item<double>(), 1.0, 1e-5);
  });
}

TEST_P(FlatShards, OfPaddingAloneAreTrainedToo) {
  on_threads(GetParam(), [] {
    torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
    as_one(*model);
    torch::optim::Adam optimizer(model->parameters(), 0.5);
    const double before = model->weight.item<double>();
    model->forward(torch::ones({1, 1})).sum().backward();
    optimizer.step();
    EXPECT_EQ(optimizer.state().size(), 1);
    EXPECT_NEAR(model->weight.item<double>(), before - 0.5, 1e-5);
    EXPECT_TRUE(rank() == 0 || model->parameters()[0].item<float>() == 0) << "no padding";
    const auto state = full_optim_state_dict(model, optimizer);
    EXPECT_NEAR(state.state["weight"].tensors.at("exp_avg").item<double>(), 0.1, 1e-6);
    load_optim_state_dict(model, optimizer, state);
    EXPECT_EQ(optimizer.state().size(), 1);
  });
}

TEST_P(FlatShards, AreDescribedByTheirParameters) {
  on_threads(GetParam(), [] {
    torch::nn::Sequential model(torch::nn::Linear(5, 7), torch::nn::Linear(7, 2));
    as_one(*model[0]);
    as_one(*model);
    const auto units = describe(model).units;
    ASSERT_EQ(units.size(), 2);
    EXPECT_EQ(units[0].numel + units[1].numel, 42 + 16);
    EXPECT_EQ(units[0].parameters, 2);
  });
}

TEST_P(FlatShards, OutliveTheirModel) {
  on_threads(GetParam(), [] {
    at::Tensor flat;
    {
      torch::nn::Linear model(5, 7);
      as_one(*model);
      flat = model->parameters()[0];
    }
    torch::NoGradGuard no_grad;
    flat.add_(1);
    EXPECT_FALSE(is_sharded(flat));
  });
}

struct InOnePlace : torch::nn::Module {
  InOnePlace() : weight(register_parameter("weight", torch::ones({4, 3}))) {}
  static void* operator new(size_t) {
    alignas(std::max_align_t) static thread_local std::byte place[4096];
    static_assert(sizeof(place) >= sizeof(InOnePlace));
    return place;
  }
  static void operator delete(void*) {}
  at::Tensor weight;
};

bool hides_a_weight(const InOnePlace& module) {
  return nn::hidden_parameters::find(module, "weight") != nullptr;
}

std::shared_ptr<engine::Unit> shard_as_one(InOnePlace& module) {
  const auto unit = nn::make_unit({&module}, {}, FlatCut{.shown_as_one = true});
  EXPECT_TRUE(hides_a_weight(module));
  return unit;
}

TEST(FlatShards, OfAModuleThatWentAreNotThoseOfTheNextAtItsAddress) {
  on_threads(2, [] {
    std::shared_ptr<InOnePlace> module(new InOnePlace());
    const auto unit = shard_as_one(*module); // which may live longer
    module = nullptr;
    module.reset(new InOnePlace());
    EXPECT_FALSE(hides_a_weight(*module));
    EXPECT_EQ(full_state_dict(*module).keys(), std::vector<std::string>{"weight"});
  });
  on_threads(2, [] {
    auto module = std::make_unique<InOnePlace>(); // which no shared pointer knows
    shard_as_one(*module);
    module = nullptr;
    module = std::make_unique<InOnePlace>();
    EXPECT_FALSE(hides_a_weight(*module));
    EXPECT_EQ(full_state_dict(*module).keys(), std::vector<std::string>{"weight"});
  });
}

} // namespace
} // namespace fsdp::testing
