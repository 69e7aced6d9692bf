// Optimizers' states from one form into another: what comes out goes into the optimizer, and says the same as before.

#include "state/training.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

class OptimStateForms : public ::testing::TestWithParam<int> {};

void expect_loads(Training& training, const ShardedOptimStateDict& pieces, const OptimStateDict& wanted) {
  load_optim_state_dict(training.net, *training.optimizer, pieces);
  expect_equal(training.state(), wanted);
}

TEST_P(OptimStateForms, PiecesOfAWholeStateAreWhatAShardedOptimizerHas) {
  on_threads(GetParam(), [] {
    for (const Kind kind : kKinds) {
      Training whole(Form::kUnsharded, kind, 10);
      whole.steps(0, 2, Form::kRows);
      const auto state = whole.state();
      for (const Form form : forms(world_size())) {
        SCOPED_TRACE(name_of(form));
        Training other(form, kind, 2000, 0.015);
        const auto before = other.state();
        const auto pieces = shard_full_optim_state_dict(other.net, *other.optimizer, state);
        expect_equal(other.state(), before);
        for (const auto& held : held(other.net)) {
          if (const auto* of_param = pieces.state.find(held.name)) {
            for (const auto& [key, piece] : of_param->tensors) {
              EXPECT_EQ(piece.extent, held.extent) << key << " of " << held.name;
              EXPECT_EQ(piece.sizes, held.sizes);
              EXPECT_EQ(piece.local.sizes(), held.local.sizes());
            }
          }
        }
        expect_loads(other, pieces, state);
      }
    }
  });
}

TEST_P(OptimStateForms, PiecesAreCopies) {
  on_threads(GetParam(), [] {
    for (const Form form : forms(world_size())) {
      Training training(form, Kind::kAdam, 10);
      training.steps(0, 1, form);
      const auto state = training.state();
      const auto pieces = shard_full_optim_state_dict(training.net, *training.optimizer, state);
      const auto others = flatten_sharded_optim_state_dict(
          training.net, *training.optimizer, sharded_optim_state_dict(training.net, *training.optimizer));
      for (const auto& item : state.state) {
        item.value().tensors.at("exp_avg").fill_(7);
      }
      training.steps(1, 2, form);
      for (const auto* dict : {&pieces, &others}) {
        Training other(form, Kind::kAdam, 10), again(form, Kind::kAdam, 10);
        other.steps(0, 1, form);
        load_optim_state_dict(again.net, *again.optimizer, *dict);
        expect_equal(again.state(), other.state());
      }
    }
  });
}

TEST_P(OptimStateForms, TheFirstRanksStateGoesToAll) {
  on_threads(GetParam(), [] {
    Training whole(Form::kUnsharded, Kind::kAdam, 10);
    whole.steps(0, 2, Form::kRows);
    const auto state = whole.state();
    for (const Form form : forms(world_size())) {
      SCOPED_TRACE(name_of(form));
      if (form == Form::kUnsharded) {
        continue; // there every rank is the first
      }
      Training other(form, Kind::kAdam, 2000, 0.015);
      const auto given = rank() == 0 ? state : OptimStateDict();
      expect_loads(other, scatter_full_optim_state_dict(other.net, *other.optimizer, given), state);
    }
  });
}

TEST_P(OptimStateForms, PiecesOfOneShardingGoIntoAnother) {
  on_threads(GetParam(), [] {
    for (const Kind kind : kKinds) {
      SCOPED_TRACE(::testing::Message() << "optimizer " << static_cast<int>(kind));
      for (const Form from : forms(world_size())) {
        Training first(from, kind, 10);
        first.steps(0, 2, from);
        const auto state = first.state();
        const auto pieces = sharded_optim_state_dict(first.net, *first.optimizer);
        for (const Form into : forms(world_size())) {
          if (into == Form::kUnsharded && from != Form::kUnsharded) {
            continue;
          }
          SCOPED_TRACE(::testing::Message() << name_of(from) << " -> " << name_of(into));
          Training second(into, kind, 2000, 0.015);
          second.steps(7, 8, into);
          expect_loads(second, flatten_sharded_optim_state_dict(second.net, *second.optimizer, pieces), state);
        }
      }
    }
  });
}

// An optimizer may have left out there what others have stepped.
TEST(OptimStateFormsNumbers, AreThoseOfRanksThatHaveElements) {
  on_threads(3, [] {
    Training training(Form::kRows, Kind::kAdagrad, 10), other(Form::kFlat, Kind::kAdagrad, 10);
    training.steps(0, 2, Form::kRows);
    auto pieces = sharded_optim_state_dict(training.net, *training.optimizer);
    auto& scale = pieces.state["scale"];
    EXPECT_EQ(scale.tensors.at("sum").local.numel(), rank() == 0 ? 1 : 0);
    scale.scalars["step"] = rank() == 0 ? 2 : 0;
    const auto moved = flatten_sharded_optim_state_dict(other.net, *other.optimizer, pieces);
    EXPECT_EQ(moved.state["scale"].scalars.at("step").toInt(), 2);
  });
}

// Sums of numbers would lose what sums of bytes keep.
TEST(OptimStateFormsBits, PiecesKeepTheirBits) {
  on_threads(3, [] {
    Training rows(Form::kRows, Kind::kAdam, 10), flat(Form::kFlat, Kind::kAdam, 10);
    rows.steps(0, 1, Form::kRows);
    auto state = rows.state();
    const std::vector<float> odd{-0.0f, std::nanf("5"), -std::nanf("9"), 1e-45f, INFINITY};
    state.state["first.bias"].tensors["exp_avg"] = torch::tensor(odd).repeat({2}).narrow(0, 0, 7);
    load_optim_state_dict(rows.net, *rows.optimizer, state);
    const auto pieces = sharded_optim_state_dict(rows.net, *rows.optimizer);
    load_optim_state_dict(
        flat.net, *flat.optimizer, flatten_sharded_optim_state_dict(flat.net, *flat.optimizer, pieces));
    const auto bits = [](const OptimStateDict& dict) {
      return dict.state["first.bias"].tensors.at("exp_avg").view(torch::kInt);
    };
    EXPECT_TRUE(bits(flat.state()).equal(bits(state))) << bits(flat.state());
  });
}

// Memory in the order of columns first, cut in rows of that memory, and the other way round.
TEST(OptimStateFormsOrder, PiecesOfOneMemoryOrderGoIntoAnother) {
  on_threads(2, [] {
    const auto train = [](bool turned) {
      struct Net : torch::nn::Module {
        explicit Net(bool turned) {
          const auto values = torch::arange(24.).view({4, 6});
          weight = register_parameter("weight", turned ? values.t().contiguous().t() : values);
        }
        at::Tensor weight;
      };
      auto net = std::make_shared<Net>(turned);
      fully_shard(net);
      auto optimizer = std::make_unique<torch::optim::Adam>(parameters(*net), torch::optim::AdamOptions(0.1));
      (net->weight * torch::arange(24.).view({4, 6})).sum().backward();
      optimizer->step();
      return std::pair(net, std::move(optimizer));
    };
    const auto [turned, of_turned] = train(true);
    const auto [plain, of_plain] = train(false);
    const auto pieces =
        flatten_sharded_optim_state_dict(plain, *of_plain, sharded_optim_state_dict(turned, *of_turned));
    const auto& piece = pieces.state["weight"].tensors.at("exp_avg");
    EXPECT_TRUE(piece.local.allclose(torch::arange(24.).view({4, 6}).narrow(0, rank() * 2, 2) * 0.1)) << piece.local;
  });
}

TEST_P(OptimStateForms, ParametersHaveNumbersInTheOrderOfTheGroups) {
  on_threads(GetParam(), [] {
    for (const Form form : forms(world_size())) {
      SCOPED_TRACE(name_of(form));
      Training training(form, Kind::kAdam, 10);
      training.steps(0, 1, form);
      const auto by_name = training.state();
      const auto rekeyed = [&](const OptimStateDict& state, OptimStateKeyType type) {
        return rekey_optim_state_dict(training.net, *training.optimizer, state, type);
      };
      const auto by_id = rekeyed(by_name, OptimStateKeyType::kParamId);
      size_t count = 0;
      for (size_t group = 0; group < by_name.param_groups.size(); ++group) {
        const auto& names = by_name.param_groups[group].params;
        ASSERT_EQ(by_id.param_groups[group].params.size(), names.size());
        for (size_t i = 0; i < names.size(); ++i) {
          const auto id = std::to_string(count++);
          EXPECT_EQ(by_id.param_groups[group].params[i], id);
          EXPECT_EQ(by_id.state.contains(id), by_name.state.contains(names[i])) << names[i];
          if (by_name.state.contains(names[i])) {
            const auto& moved = by_id.state[id].tensors.at("exp_avg");
            EXPECT_TRUE(moved.is_same(by_name.state[names[i]].tensors.at("exp_avg"))) << names[i];
          }
        }
      }
      expect_equal(rekeyed(by_id, OptimStateKeyType::kParamName), by_name);
      expect_equal(rekeyed(by_name, OptimStateKeyType::kParamName), by_name);
      EXPECT_EQ(rekeyed(by_id, OptimStateKeyType::kParamId).state.keys(), by_id.state.keys());
      auto other_names = by_name;
      other_names.state.insert("last.bias", by_name.state["tied"]);
      other_names.state.erase("tied");
      EXPECT_TRUE(rekeyed(other_names, OptimStateKeyType::kParamName).state.contains("tied"));
    }
  });
}

TEST(OptimStateFormsErrors, SayWhatToDo) {
  on_threads(2, [] {
    Training rows(Form::kRows, Kind::kAdam, 10), whole(Form::kUnsharded, Kind::kAdam, 10);
    Training sgd(Form::kRows, Kind::kSGD, 10);
    rows.steps(0, 1, Form::kRows);
    auto state = rows.state();
    const auto pieces = sharded_optim_state_dict(rows.net, *rows.optimizer);
    auto message = error_message([&] { flatten_sharded_optim_state_dict(whole.net, *whole.optimizer, pieces); });
    EXPECT_TRUE(contains(message, "[flatten_sharded_optim_state_dict] the ranks of a model that is not sharded have"))
        << message;
    EXPECT_TRUE(contains(message, "take a full_optim_state_dict")) << message;

    auto fewer = pieces;
    if (rank() == 1) {
      fewer.state.erase("first.weight");
    }
    message = error_message([&] { flatten_sharded_optim_state_dict(rows.net, *rows.optimizer, fewer); });
    EXPECT_TRUE(contains(message, "have 20 of the 35 elements of 'exp_avg' of 'first.weight'")) << message;

    message = error_message([&] { shard_full_optim_state_dict(sgd.net, *sgd.optimizer, state); });
    EXPECT_TRUE(contains(message, "[shard_full_optim_state_dict] the state is another optimizer's")) << message;
    message = error_message(
        [&] { scatter_full_optim_state_dict(sgd.net, *sgd.optimizer, rank() == 0 ? state : OptimStateDict()); });
    EXPECT_TRUE(contains(message, "[scatter_full_optim_state_dict] the state is another optimizer's")) << message;

    state.state.insert("nobody", {});
    message =
        error_message([&] { rekey_optim_state_dict(rows.net, *rows.optimizer, state, OptimStateKeyType::kParamId); });
    EXPECT_TRUE(contains(message, "'nobody' is neither the name of a parameter")) << message;
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, OptimStateForms, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

} // namespace
} // namespace fsdp::testing
