// Optimizers' states by name: the same from whatever sharding, and into any, and training goes on with the same bits.

#include <algorithm>
#include <memory>

#include "state/training.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

class OptimStateDicts : public ::testing::TestWithParam<int> {};

TEST_P(OptimStateDicts, HaveWhatOptimizersKeepByName) {
  on_threads(GetParam(), [] {
    for (const Form form : forms(world_size())) {
      SCOPED_TRACE(name_of(form));
      Training training(form, Kind::kAdam, 1000);
      training.steps(0, 3, form);
      const auto dict = training.state();
      const std::vector<std::string> updated{
          "scale", "own", "turned", "tied", "first.weight", "first.bias", "last.weight"};
      EXPECT_EQ(dict.state.keys(), updated) << "not what is frozen or unused";
      for (const auto& name : updated) {
        const auto& state = dict.state[name];
        EXPECT_EQ(keys_of(state.tensors), (std::vector<std::string>{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}));
        EXPECT_EQ(state.scalars.at("step").toInt(), 3);
      }
      ASSERT_EQ(dict.param_groups.size(), 2u);
      EXPECT_EQ(dict.param_groups[0].params, (std::vector<std::string>{"first.weight", "first.bias"}));
      EXPECT_EQ(dict.param_groups[0].options.at("lr").toDouble(), 0.02);
      EXPECT_EQ(dict.param_groups[1].options.at("lr").toDouble(), 0.01);
      EXPECT_TRUE(dict.param_groups[1].options.at("amsgrad").toBool());
    }
  });
}

/// Training without interruption or shards, which adds gradients in the order of one form, and later of another.
struct Uninterrupted {
  Uninterrupted(Kind kind, Form from, Form into)
      : training(Form::kUnsharded, kind, 10),
        first_losses(training.steps(0, 2, from)),
        state_between(training.state()),
        last_losses(training.steps(2, 4, into)),
        state_at_end(training.state()) {}

  Training training;
  std::vector<float> first_losses;
  OptimStateDict state_between;
  std::vector<float> last_losses;
  OptimStateDict state_at_end;
};

TEST_P(OptimStateDicts, GoFromAnyShardingIntoAny) {
  on_threads(GetParam(), [] {
    for (const Kind kind : kKinds) {
      std::map<std::pair<bool, bool>, Uninterrupted> by_order;
      const auto uninterrupted = [&](Form from, Form into) -> const Uninterrupted& {
        return by_order.try_emplace({is_hybrid(from), is_hybrid(into)}, kind, from, into).first->second;
      };
      for (const Form from : forms(world_size())) {
        SCOPED_TRACE(::testing::Message() << "optimizer " << static_cast<int>(kind) << " of " << name_of(from));
        Training first(from, kind, 10);
        EXPECT_EQ(first.steps(0, 2, from), uninterrupted(from, from).first_losses);
        const auto dict = first.state();
        const auto weights = full_state_dict(first.net);
        for (const Form into : forms_after(from, kind)) {
          SCOPED_TRACE(::testing::Message() << "into " << name_of(into));
          const Uninterrupted& wanted = uninterrupted(from, into);
          expect_equal(dict, wanted.state_between);
          Training second(into, kind, 2000, /*lr=*/0.015);
          second.steps(7, 8, into); // what it has is replaced
          load_state_dict(second.net, weights);
          load_optim_state_dict(second.net, *second.optimizer, dict);
          expect_equal(second.state(), dict);
          EXPECT_EQ(second.steps(2, 4, into), wanted.last_losses);
          expect_equal(second.state(), wanted.state_at_end);
        }
      }
    }
  });
}

TEST_P(OptimStateDicts, MayBeOfTheFirstRankAlone) {
  on_threads(GetParam(), [] {
    Training first(Form::kFlat, Kind::kAdam, 10), second(Form::kRows, Kind::kAdam, 2000, 0.015);
    first.steps(0, 2, Form::kFlat);
    const auto dict = full_optim_state_dict(first.net, *first.optimizer, {.rank0_only = true, .offload_to_cpu = true});
    EXPECT_EQ(dict.state.is_empty(), rank() != 0);
    EXPECT_EQ(dict.param_groups.empty(), rank() != 0);
    load_optim_state_dict(second.net, *second.optimizer, dict, {.broadcast_from_rank0 = true});
    expect_equal(second.state(), first.state());
  });
}

TEST(HybridOptimStateDicts, GoFromTheFirstRankToAllReplicas) {
  on_threads(4, [] {
    Training first(Form::kHybrid, Kind::kSGD, 10);
    first.steps(0, 2, Form::kHybrid);
    const auto dict = full_optim_state_dict(first.net, *first.optimizer, {.rank0_only = true});
    EXPECT_EQ(dict.state.is_empty(), rank() != 0);
    for (const Form into : {Form::kHybridFlat, Form::kHybridShown}) {
      Training second(into, Kind::kSGD, 2000, 0.015);
      load_optim_state_dict(second.net, *second.optimizer, dict, {.broadcast_from_rank0 = true});
      expect_equal(second.state(), first.state());
    }
  });
}

TEST_P(OptimStateDicts, BeforeTheFirstStepHaveHyperParametersOnly) {
  on_threads(GetParam(), [] {
    for (const Kind kind : kKinds) {
      for (const Form form : forms(world_size())) {
        Training fresh(form, kind, 10), stepped(form, kind, 10, 0.015);
        stepped.steps(0, 1, form);
        const auto dict = fresh.state();
        EXPECT_EQ(dict.param_groups.size(), 2u);
        if (kind != Kind::kAdagrad) { // which begins with a state
          EXPECT_TRUE(dict.state.is_empty());
        }
        load_optim_state_dict(stepped.net, *stepped.optimizer, dict);
        expect_equal(stepped.state(), dict);
      }
    }
  });
}

TEST_P(OptimStateDicts, AreCopies) {
  on_threads(GetParam(), [] {
    for (const Form form : forms(world_size())) {
      Training training(form, Kind::kAdam, 10);
      training.steps(0, 1, form);
      const auto dict = training.state();
      const auto kept = dict.state["first.weight"].tensors.at("exp_avg").clone();
      Training other(form, Kind::kAdam, 10);
      load_optim_state_dict(other.net, *other.optimizer, dict);
      training.steps(1, 2, form);
      other.steps(1, 2, form);
      EXPECT_TRUE(dict.state["first.weight"].tensors.at("exp_avg").equal(kept)) << name_of(form);
    }
  });
}

TEST_P(OptimStateDicts, OfPiecesGoOnWhereTheyWereTaken) {
  on_threads(GetParam(), [] {
    for (const Kind kind : kKinds) {
      for (const Form form : forms(world_size())) {
        SCOPED_TRACE(name_of(form));
        Training first(form, kind, 10), second(form, kind, 2000, 0.015);
        first.steps(0, 2, form);
        load_state_dict(second.net, sharded_state_dict(first.net));
        load_optim_state_dict(second.net, *second.optimizer, sharded_optim_state_dict(first.net, *first.optimizer));
        expect_equal(second.state(), first.state());
        EXPECT_EQ(second.steps(2, 4, form), first.steps(2, 4, form));
      }
    }
  });
}

TEST_P(OptimStateDicts, OfPiecesThatAreWholeGoIntoAnySharding) {
  on_threads(GetParam(), [] {
    Training whole(Form::kUnsharded, Kind::kAdam, 10);
    whole.steps(0, 2, Form::kRows);
    for (const Form form : forms(world_size())) {
      Training other(form, Kind::kAdam, 2000, 0.015);
      load_optim_state_dict(other.net, *other.optimizer, sharded_optim_state_dict(whole.net, *whole.optimizer));
      expect_equal(other.state(), whole.state());
    }
  });
}

TEST(ShardedOptimStateDicts, NeedNoOtherRank) {
  on_threads(2, [] {
    Training training(Form::kRows, Kind::kAdam, 10);
    training.steps(0, 1, Form::kRows);
    if (rank() == 0) {
      const auto dict = sharded_optim_state_dict(training.net, *training.optimizer);
      const HeldTensor& average = dict.state["first.weight"].tensors.at("exp_avg");
      EXPECT_EQ(average.sizes, (std::vector<int64_t>{7, 5}));
      EXPECT_EQ(average.extent, (Extent{0, 20, 20, 1}));
      EXPECT_EQ(average.local.sizes(), (c10::IntArrayRef{4, 5}));
      load_optim_state_dict(training.net, *training.optimizer, dict);
    }
    barrier();
  });
}

TEST(ShardedOptimStateDicts, ThatLackElementsAreAnError) {
  on_threads(2, [] {
    Training rows(Form::kRows, Kind::kAdam, 10), columns(Form::kColumns, Kind::kAdam, 10);
    rows.steps(0, 1, Form::kRows);
    const auto dict = sharded_optim_state_dict(rows.net, *rows.optimizer);
    const auto message = error_message([&] { load_optim_state_dict(columns.net, *columns.optimizer, dict); });
    EXPECT_TRUE(contains(message, "'first.weight' is cut in another way")) << message;
    EXPECT_TRUE(columns.state().state.is_empty()) << "none was loaded";
  });
}

// As Python's optimizers keep it; a tied parameter may go under any of its names.
TEST(OptimStateDictsOfOtherPrograms, MayHaveStepsInTensorsAndOtherNamesOfTiedParameters) {
  on_threads(1, [] {
    Training training(Form::kUnsharded, Kind::kAdam, 10), other(Form::kUnsharded, Kind::kAdam, 10);
    training.steps(0, 2, Form::kUnsharded);
    const auto dict = training.state();
    OptimStateDict theirs;
    theirs.param_groups = dict.param_groups;
    for (auto& group : theirs.param_groups) {
      std::replace(group.params.begin(), group.params.end(), std::string("tied"), std::string("last.bias"));
      group.options["foreach"] = false; // which we do not have
    }
    for (const auto& item : dict.state) {
      auto state = item.value();
      state.scalars["step"] = torch::full({}, 2.0);
      theirs.state.insert(item.key() == "tied" ? "last.bias" : item.key(), state);
    }
    load_optim_state_dict(other.net, *other.optimizer, theirs);
    expect_equal(other.state(), dict);
  });
}

TEST_P(OptimStateDicts, OfAnotherOptimizerAreAnErrorThatChangesNothing) {
  on_threads(GetParam(), [] {
    for (const bool broadcast : {false, true}) {
      Training adam(Form::kRows, Kind::kAdam, 10), sgd(Form::kRows, Kind::kSGD, 10);
      sgd.steps(0, 1, Form::kRows);
      auto dict = sgd.state();
      dict.param_groups[0].params.pop_back();
      dict.state["scale"].tensors["momentum_buffer"] = torch::zeros({2});
      dict.state.insert("frozen_too", {});
      if (broadcast && rank() != 0) {
        dict = OptimStateDict();
      }
      const LoadOptimStateDictOptions options{.broadcast_from_rank0 = broadcast};
      auto message = error_message([&] { load_optim_state_dict(adam.net, *adam.optimizer, dict, options); });
      EXPECT_TRUE(contains(message, "group 0, missing: first.bias; unexpected: ")) << message;
      EXPECT_TRUE(contains(message, "'momentum_buffer' of 'first.weight' is no tensor of this optimizer's")) << message;
      EXPECT_TRUE(contains(message, "'frozen_too' is no parameter of this optimizer's")) << message;
      EXPECT_TRUE(adam.state().state.is_empty());
      const auto before = sgd.state();
      message = error_message([&] { load_optim_state_dict(sgd.net, *sgd.optimizer, dict, options); });
      EXPECT_TRUE(contains(message, "'scale' has sizes [] in the model, its 'momentum_buffer' [2]")) << message;
      expect_equal(sgd.state(), before);
      dict.param_groups.clear();
      message = error_message([&] { load_optim_state_dict(sgd.net, *sgd.optimizer, dict, options); });
      EXPECT_TRUE(contains(message, "groups of parameters: 2 here and 0 there")) << message;
    }
  });
}

// Or the others would wait for the first rank, which cannot send it.
TEST_P(OptimStateDicts, WithoutValuesAreAnErrorThatChangesNothing) {
  on_threads(GetParam(), [] {
    for (const bool sparse : {false, true}) {
      Training training(Form::kRows, Kind::kAdam, 10);
      training.steps(0, 1, Form::kRows);
      const auto before = training.state();
      auto dict = training.state();
      auto& state = dict.state["first.weight"].tensors.at("exp_avg");
      state = sparse ? state.to_sparse() : state.to(torch::kMeta);
      if (rank() != 0) {
        dict = OptimStateDict();
      }
      const LoadOptimStateDictOptions options{.broadcast_from_rank0 = true};
      const auto message =
          error_message([&] { load_optim_state_dict(training.net, *training.optimizer, dict, options); });
      EXPECT_TRUE(contains(message, "'exp_avg' of 'first.weight' is no dense tensor with values")) << message;
      expect_equal(training.state(), before);
    }
  });
}

// It is there before the first step, which could not be made without it.
TEST(AdagradStateDicts, ThatLackAStateLeaveTheOneThatIsThere) {
  on_threads(2, [] {
    Training first(Form::kRows, Kind::kAdagrad, 10), second(Form::kRows, Kind::kAdagrad, 10);
    first.steps(0, 2, Form::kRows);
    auto dict = first.state();
    dict.state.erase("scale");
    const auto kept = second.state().state["scale"].tensors.at("sum");
    load_optim_state_dict(second.net, *second.optimizer, dict);
    EXPECT_TRUE(second.state().state["scale"].tensors.at("sum").equal(kept));
    second.steps(2, 3, Form::kRows);
  });
}

TEST(OptimStateDictsErrors, SayWhatIsMissingOrOfAnotherKind) {
  on_threads(2, [] {
    Training training(Form::kRows, Kind::kAdam, 10);
    training.steps(0, 1, Form::kRows);
    const auto before = training.state();
    const auto refusal = [&](const auto& change) {
      auto dict = training.state();
      change(dict);
      const auto message = error_message([&] { load_optim_state_dict(training.net, *training.optimizer, dict); });
      expect_equal(training.state(), before);
      return message;
    };
    EXPECT_TRUE(contains(
        refusal([](auto& dict) { dict.state["scale"].scalars.erase("step"); }), "'step' of 'scale' is missing"));
    EXPECT_TRUE(contains(
        refusal([](auto& dict) { dict.state["scale"].tensors.erase("exp_avg"); }), "'exp_avg' of 'scale' is missing"));
    EXPECT_TRUE(contains(
        refusal([](auto& dict) { dict.state["scale"].scalars["step"] = "three"; }),
        "'step' of 'scale' is no number of this optimizer's"));
    EXPECT_TRUE(contains(
        refusal([](auto& dict) { dict.state["scale"].scalars["surprise"] = 3; }),
        "'surprise' of 'scale' is no number of this optimizer's"));
    EXPECT_TRUE(contains(
        refusal([](auto& dict) { dict.param_groups[1].options["betas"] = 0.9; }),
        "group 1: 'betas' is of another kind"));
  });
}

// As Python's optimizers have them, in which C++'s have no such thing.
TEST(OptimStateDictsErrors, SayWhichHyperParametersWouldChangeSteps) {
  on_threads(1, [] {
    Training adam(Form::kUnsharded, Kind::kAdam, 10), adamw(Form::kUnsharded, Kind::kAdamW, 10);
    double decay = 0.1;
    const auto load_with = [&](Training& training, const std::string& key, const c10::IValue& value) {
      auto dict = training.state();
      dict.param_groups[1].options["weight_decay"] = decay;
      dict.param_groups[1].options[key] = value;
      load_optim_state_dict(training.net, *training.optimizer, dict);
    };
    const auto refusal = [&](Training& training, const std::string& key, const c10::IValue& value) {
      return error_message([&] { load_with(training, key, value); });
    };
    const std::string unknown = "group 1 has 'maximize', which this optimizer does not know";
    EXPECT_TRUE(contains(refusal(adam, "maximize", true), unknown));
    EXPECT_TRUE(contains(refusal(adam, "maximize", torch::ones({})), unknown));
    EXPECT_TRUE(contains(refusal(adam, "factor", 0.5), "group 1 has 'factor'"));
    EXPECT_TRUE(contains(refusal(adam, "decoupled_weight_decay", true), "1: weights decay beside the step there"));
    EXPECT_TRUE(contains(refusal(adamw, "decoupled_weight_decay", false), "1: weights decay through the gradient"));
    for (const char* name : {"foreach", "fused", "capturable", "differentiable"}) {
      load_with(adam, name, true);
    }
    load_with(adam, "initial_lr", 0.5);
    load_with(adam, "maximize", false);
    load_with(adam, "foreach", c10::IValue());
    load_with(adam, "name", "decoder");
    load_with(adam, "decoupled_weight_decay", false);
    load_with(adamw, "decoupled_weight_decay", true);
    decay = 0;
    load_with(adam, "decoupled_weight_decay", true);
    load_with(adamw, "decoupled_weight_decay", false);
  });
}

TEST_P(OptimStateDicts, GiveAFlatParameterOneStateWithZerosWhereItsParametersHaveNone) {
  on_threads(GetParam(), [] {
    Training whole(Form::kUnsharded, Kind::kAdam, 10), shown(Form::kShown, Kind::kAdam, 2000, 0.015);
    whole.steps(0, 2, Form::kShown);
    auto dict = whole.state();
    dict.state.erase("turned");
    load_optim_state_dict(shown.net, *shown.optimizer, dict);
    const auto state = shown.state().state["turned"];
    EXPECT_EQ(state.scalars.at("step").toInt(), 2);
    expect_same(state.tensors.at("exp_avg"), torch::zeros({3, 4}), "turned");
    expect_same(shown.state().state["scale"].tensors.at("exp_avg"), dict.state["scale"].tensors.at("exp_avg"), "scale");
  });
}

TEST_P(OptimStateDicts, WithDifferentNumbersInOneFlatParameterAreAnError) {
  on_threads(GetParam(), [] {
    Training whole(Form::kUnsharded, Kind::kAdam, 10), shown(Form::kShown, Kind::kAdam, 2000, 0.015);
    whole.steps(0, 2, Form::kShown);
    auto dict = whole.state();
    dict.state["turned"].scalars["step"] = 3;
    const auto message = error_message([&] { load_optim_state_dict(shown.net, *shown.optimizer, dict); });
    EXPECT_TRUE(contains(message, "'scale' and 'turned' lie in one flat parameter")) << message;
    EXPECT_TRUE(shown.state().state.is_empty()) << "none was loaded";
  });
}

TEST(OptimStateDictsErrors, SayThatARankHasNoStateOfWhatItHas) {
  on_threads(2, [] {
    for (const auto form : {Form::kRows, Form::kFlat, Form::kShown}) {
      auto net = make(form, 0);
      torch::optim::AdamW optimizer(net->parameters());
      net->loss(rank(), 0).backward();
      optimizer.step();
      if (rank() == 1) {
        optimizer.state().clear();
      }
      EXPECT_TRUE(contains(error_message([&] { full_optim_state_dict(net, optimizer); }), "rank 1 has no state of"));
    }
  });
}

TEST(OptimStateDictsErrors, SayThatRanksHaveSteppedDifferently) {
  on_threads(2, [] {
    Training training(Form::kRows, Kind::kAdam, 10);
    training.steps(0, 1, Form::kRows);
    if (rank() == 1) {
      for (auto& [param, state] : training.optimizer->state()) {
        static_cast<torch::optim::AdamParamState&>(*state).step(9);
      }
    }
    EXPECT_TRUE(contains(error_message([&] { training.state(); }), "differently often"));
  });
}

struct Unknown : torch::optim::SGD {
  using SGD::SGD;
};

struct Other : Optimizer {
  explicit Other(std::vector<at::Tensor> params)
      : Optimizer(std::move(params), std::make_unique<torch::optim::SGDOptions>(1)) {}
  at::Tensor step(LossClosure /*closure*/) override {
    return {};
  }
};

TEST(OptimStateDictsErrors, SayWhatToDo) {
  on_threads(2, [] {
    OddNet net = make(Form::kRows, 0), other = make(Form::kRows, 0);
    const auto refusal = [&](Optimizer& optimizer) {
      return error_message([&] { full_optim_state_dict(net, optimizer); });
    };
    torch::optim::LBFGS lbfgs(parameters(*net));
    EXPECT_TRUE(contains(refusal(lbfgs), "LBFGS keeps vectors of all parameters together"));
    fsdp::optim::LBFGS ours(parameters(*net));
    EXPECT_TRUE(contains(refusal(ours), "torch::save the optimizer once per rank"));
    Other unknown(parameters(*net));
    EXPECT_TRUE(contains(refusal(unknown), "Other, of whose state nothing is known"));
    torch::optim::SGD of_others(parameters(*other), 0.1);
    EXPECT_TRUE(contains(refusal(of_others), "is not the module's: give the module"));
    torch::optim::SGD too_early({net->first->weight}, 0.1);
    EXPECT_TRUE(contains(refusal(too_early), "'first.weight' before that was sharded"));
    Unknown derived(parameters(*net), 0.1);
    EXPECT_TRUE(full_optim_state_dict(net, derived).state.is_empty()) << "its state is its base's";
    auto guard = summon_full_params(net);
    EXPECT_TRUE(contains(refusal(derived), "end that guard first"));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, OptimStateDicts, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

} // namespace
} // namespace fsdp::testing
