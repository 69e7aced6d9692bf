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

void expect_same_pieces(const ShardedOptimStateDict& got, const ShardedOptimStateDict& wanted) {
  for (const auto& item : wanted.state) {
    SCOPED_TRACE(item.key());
    ASSERT_TRUE(got.state.contains(item.key()));
    expect_equal(got.state[item.key()].scalars, item.value().scalars);
    for (const auto& [key, piece] : item.value().tensors) {
      const HeldTensor& other = got.state[item.key()].tensors.at(key);
      EXPECT_EQ(other.name, piece.name);
      EXPECT_EQ(other.sizes, piece.sizes);
      EXPECT_EQ(other.strides, piece.strides);
      EXPECT_EQ(other.extent, piece.extent);
      EXPECT_EQ(other.mesh, piece.mesh);
      EXPECT_EQ(other.first_replica, piece.first_replica);
      expect_same(other.local, piece.local, key);
    }
  }
}

TEST_P(OptimStateForms, PiecesOfAWholeStateAreWhatAShardedOptimizerHas) {
  on_threads(GetParam(), [] {
    for (const Kind kind : kKinds) {
      for (const Form form : forms(world_size())) {
        SCOPED_TRACE(name_of(form));
        Training first(form, kind, 10), second(form, kind, 2000, 0.015);
        first.steps(0, 2, form);
        const auto before = second.state();
        const auto pieces = shard_full_optim_state_dict(second.net, *second.optimizer, first.state());
        expect_equal(second.state(), before);
        expect_same_pieces(pieces, sharded_optim_state_dict(first.net, *first.optimizer));
        expect_loads(second, pieces, first.state());
      }
    }
  });
}

TEST_P(OptimStateForms, BeforeTheFirstStepHaveHyperParametersOnly) {
  on_threads(GetParam(), [] {
    for (const Kind kind : {Kind::kSGD, Kind::kAdagrad}) {
      Training rows(Form::kRows, kind, 10), flat(Form::kFlat, kind, 10, 0.015);
      const auto pieces = sharded_optim_state_dict(rows.net, *rows.optimizer);
      expect_loads(flat, flatten_sharded_optim_state_dict(flat.net, *flat.optimizer, pieces), rows.state());
    }
  });
}

// Each rank trains by itself what is not sharded, perhaps not always, perhaps of another size.
TEST(OptimStateFormsOwn, StatesOfWhatIsNotShardedStayEachRanks) {
  on_threads(3, [] {
    Training first(Form::kRows, Kind::kAdam, 10), second(Form::kFlat, Kind::kAdam, 10, 0.015);
    first.steps(0, 2, Form::kRows);
    auto pieces = sharded_optim_state_dict(first.net, *first.optimizer);
    auto& own = pieces.state["own"];
    own.tensors["exp_avg"].local = torch::full({3}, 5.0 + rank());
    own.scalars["step"] = 5 + rank();
    if (rank() == 2) {
      pieces.state.erase("own");
    }
    const auto moved = flatten_sharded_optim_state_dict(second.net, *second.optimizer, pieces);
    EXPECT_EQ(moved.state.contains("own"), rank() != 2);
    if (rank() != 2) {
      EXPECT_EQ(moved.state["own"].scalars.at("step").toInt(), 5 + rank());
      expect_same(moved.state["own"].tensors.at("exp_avg").local, torch::full({3}, 5.0 + rank()), "own");
    }
    EXPECT_TRUE(moved.state.contains("scale"));
  });
}

TEST(OptimStateFormsOwn, WrongOnesOfOneRankAreAnErrorOnAll) {
  on_threads(3, [] {
    Training training(Form::kRows, Kind::kAdam, 10);
    training.steps(0, 1, Form::kRows);
    auto pieces = sharded_optim_state_dict(training.net, *training.optimizer);
    if (rank() == 1) {
      pieces.state["own"].tensors["surprise"] = pieces.state["own"].tensors["exp_avg"];
    }
    const auto message =
        error_message([&] { flatten_sharded_optim_state_dict(training.net, *training.optimizer, pieces); });
    EXPECT_TRUE(contains(message, "'surprise' of 'own' is no tensor of this optimizer's")) << message;
  });
}

// One rank alone may have kept a state that every rank had whole.
TEST(OptimStateFormsWhole, PiecesOfOneRankGoToAll) {
  on_threads(3, [] {
    Training whole(Form::kUnsharded, Kind::kAdam, 10), rows(Form::kRows, Kind::kAdam, 10, 0.015);
    whole.steps(0, 2, Form::kRows);
    auto pieces = sharded_optim_state_dict(whole.net, *whole.optimizer);
    auto wanted = whole.state();
    if (rank() != 0) {
      pieces = ShardedOptimStateDict();
    }
    const auto moved = flatten_sharded_optim_state_dict(rows.net, *rows.optimizer, pieces);
    load_optim_state_dict(rows.net, *rows.optimizer, moved);
    auto got = rows.state();
    if (rank() != 0) { // which it has by itself, or not at all
      wanted.state.erase("own");
    }
    expect_equal(got, wanted);
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
        for (const Form into : forms_after(from, kind)) {
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

// Sums of floats would lose what sums of integers keep.
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

struct Matrix : torch::nn::Module {
  explicit Matrix(at::Tensor values) {
    weight = register_parameter("weight", std::move(values));
  }
  at::Tensor weight;
};

// The rows of one are the columns of the other's memory.
TEST(OptimStateFormsOrder, PiecesOfOneMemoryOrderGoIntoAnother) {
  on_threads(2, [] {
    const auto values = torch::arange(24.).view({4, 6});
    const auto train = [&](bool turned) {
      auto net = std::make_shared<Matrix>(turned ? values.t().contiguous().t() : values.clone());
      fully_shard(net);
      auto optimizer = std::make_unique<torch::optim::Adam>(parameters(*net), torch::optim::AdamOptions(0.1));
      (net->weight * values).sum().backward();
      optimizer->step();
      return std::pair(net, std::move(optimizer));
    };
    const auto turned = train(true), plain = train(false);
    const auto expect_goes = [&](const auto& from, const auto& into) {
      const auto pieces = flatten_sharded_optim_state_dict(
          into.first, *into.second, sharded_optim_state_dict(from.first, *from.second));
      const at::Tensor& piece = pieces.state["weight"].tensors.at("exp_avg").local;
      EXPECT_TRUE(piece.allclose(values.narrow(0, rank() * 2, 2) * 0.1)) << piece;
    };
    expect_goes(turned, plain);
    expect_goes(plain, turned);
    const auto message = error_message([&] {
      const auto& mixed = rank() == 0 ? turned : plain;
      flatten_sharded_optim_state_dict(
          plain.first, *plain.second, sharded_optim_state_dict(mixed.first, *mixed.second));
    });
    EXPECT_TRUE(contains(message, "give pieces of one model")) << message;
  });
}

// As many elements as there are, but others.
TEST(OptimStateFormsErrors, SayThatTwoRanksGiveTheSamePieces) {
  on_threads(2, [] {
    static ShardedOptimStateDict of_first;
    auto net = std::make_shared<Matrix>(torch::ones({4, 2}));
    fully_shard(net);
    torch::optim::Adam optimizer(parameters(*net), torch::optim::AdamOptions(0.1));
    net->weight.sum().backward();
    optimizer.step();
    if (rank() == 0) {
      of_first = sharded_optim_state_dict(net, optimizer);
    }
    barrier();
    const auto message = error_message([&] { flatten_sharded_optim_state_dict(net, optimizer, of_first); });
    EXPECT_TRUE(contains(message, "have 8 elements where each of 8 is needed once")) << message;
    barrier();
    if (rank() == 0) {
      of_first = ShardedOptimStateDict();
    }
  });
}

TEST(OptimStateFormsErrors, SayOnAllRanksThatAPieceOfOneHasNoValues) {
  on_threads(2, [] {
    Training rows(Form::kRows, Kind::kAdam, 10), flat(Form::kFlat, Kind::kAdam, 10);
    rows.steps(0, 1, Form::kRows);
    auto pieces = sharded_optim_state_dict(rows.net, *rows.optimizer);
    if (rank() == 1) {
      auto& piece = pieces.state["first.weight"].tensors.at("exp_avg");
      piece.local = piece.local.to(torch::kMeta);
    }
    const auto message = error_message([&] { flatten_sharded_optim_state_dict(flat.net, *flat.optimizer, pieces); });
    EXPECT_TRUE(contains(message, "'exp_avg' of 'first.weight' is no dense tensor with values")) << message;
  });
}

TEST(OptimStateFormsErrors, SayThatAParameterHasTwoStates) {
  on_threads(2, [] {
    Training training(Form::kRows, Kind::kAdam, 10);
    training.steps(0, 1, Form::kRows);
    auto state = training.state();
    state.state.insert("last.bias", state.state["tied"]);
    auto message = error_message([&] { load_optim_state_dict(training.net, *training.optimizer, state); });
    EXPECT_TRUE(contains(message, "'tied' and 'last.bias' are one parameter here")) << message;
    message = error_message(
        [&] { rekey_optim_state_dict(training.net, *training.optimizer, state, OptimStateKeyType::kParamId); });
    EXPECT_TRUE(contains(message, "'last.bias' and another key are names of one parameter")) << message;
  });
}

// Nobody looks at what the others have.
TEST(OptimStateFormsOfTheFirst, OthersMayGiveAnything) {
  on_threads(3, [] {
    Training first(Form::kRows, Kind::kAdam, 10), second(Form::kFlat, Kind::kAdam, 10, 0.015);
    first.steps(0, 1, Form::kRows);
    auto state = first.state();
    if (rank() != 0) {
      state.state["scale"].tensors["exp_avg"] = at::Tensor();
      state.state.insert("nobody", {});
      state.param_groups.clear();
    }
    expect_loads(second, scatter_full_optim_state_dict(second.net, *second.optimizer, state), first.state());
  });
}

TEST(OptimStateFormsErrors, SayThatOnlyTheFirstRankHasAState) {
  on_threads(2, [] {
    Training training(Form::kRows, Kind::kAdam, 10);
    const auto message =
        error_message([&] { load_optim_state_dict(training.net, *training.optimizer, OptimStateDict()); });
    EXPECT_TRUE(contains(message, "nothing is there: if only the first rank has it")) << message;
  });
}

TEST(OptimStateFormsErrors, SayThatNumbersAreNamesToo) {
  on_threads(1, [] {
    torch::nn::ParameterList list;
    list->append(torch::ones({2}));
    list->append(torch::ones({3}));
    const auto parameters = list->parameters();
    const auto rekeyed = [&](const std::vector<at::Tensor>& order) {
      torch::optim::SGD optimizer(order, 0.1);
      const auto state = full_optim_state_dict(list, optimizer);
      return rekey_optim_state_dict(list, optimizer, state, OptimStateKeyType::kParamId).param_groups[0].params;
    };
    EXPECT_EQ(rekeyed({parameters[0], parameters[1]}), (std::vector<std::string>{"0", "1"}));
    EXPECT_TRUE(contains(error_message([&] { rekeyed({parameters[1], parameters[0]}); }), "numbers for names"));
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
    EXPECT_TRUE(contains(message, "the ranks of a model that is not sharded have")) << message;
    EXPECT_TRUE(contains(message, "take a full_optim_state_dict")) << message;

    auto fewer = pieces;
    if (rank() == 1) {
      fewer.state.erase("first.weight");
    }
    message = error_message([&] { flatten_sharded_optim_state_dict(rows.net, *rows.optimizer, fewer); });
    EXPECT_TRUE(
        contains(message, "'exp_avg' of 'first.weight' the ranks of Mesh(2, cpu) have 20 elements where each of 35"))
        << message;

    message = error_message([&] { shard_full_optim_state_dict(sgd.net, *sgd.optimizer, state); });
    EXPECT_TRUE(contains(message, "[shard_full_optim_state_dict] the state is another optimizer's")) << message;
    message = error_message(
        [&] { scatter_full_optim_state_dict(sgd.net, *sgd.optimizer, rank() == 0 ? state : OptimStateDict()); });
    EXPECT_TRUE(contains(message, "[scatter_full_optim_state_dict] the state is another optimizer's")) << message;

    state.state.insert("nobody", {});
    message =
        error_message([&] { rekey_optim_state_dict(rows.net, *rows.optimizer, state, OptimStateKeyType::kParamId); });
    EXPECT_TRUE(contains(message, "'nobody' is no name of a parameter")) << message;
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, OptimStateForms, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

} // namespace
} // namespace fsdp::testing
