// What is read is what was written last, whether or not an operator showed the write; and looking at parameters alone
// disturbs nobody.

#include "nn/freshness.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

using WriteShard = std::function<void(at::Tensor&)>;

struct Program {
  WriteShard write = with_an_operator;
  Between before_write = kNothing;
  Between after_write = kNothing;
  FullyShardOptions options = {};
  bool root_only = false;
  bool stays_whole = false; ///< after the backward
  std::function<nn::Sequential()> make = nullptr; ///< a stack of three, if null
};

/// Only the head is trained, of which one rank has all.
nn::Sequential frozen_but_for_the_head() {
  const std::scoped_lock lock(making);
  nn::Sequential model = stack_of(2);
  for (auto& parameter : model->parameters()) {
    parameter.set_requires_grad(false);
  }
  nn::Linear head(6, 1);
  const torch::NoGradGuard no_grad;
  head->weight.fill_(0.5);
  head->bias.fill_(0.25);
  model->push_back(head);
  return model;
}

/// Only an embedding is trained, of which two rows are looked up: the first rank's.
struct SignsImpl : nn::Module {
  SignsImpl() {
    const torch::NoGradGuard no_grad;
    embedding->weight.copy_(subjects::data(0, 0, {12, 6}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return embedding->forward(x.select(1, 0).gt(0).to(torch::kLong));
  }
  nn::Embedding embedding = register_module("embedding", nn::Embedding(12, 6));
};
TORCH_MODULE(Signs);

nn::Sequential embedding_of_which_little_is_used() {
  const std::scoped_lock lock(making);
  const nn::Sequential rest = stack_of(1);
  for (auto& parameter : rest->parameters()) {
    parameter.set_requires_grad(false);
  }
  nn::Sequential model;
  model->push_back(Signs());
  model->push_back(nn::Tanh());
  for (const auto& layer : *rest) {
    model->push_back(layer);
  }
  return model;
}

// Losses of each step, then all whole parameters.
std::vector<at::Tensor> train(const Program& program, int steps = 6) {
  nn::Sequential model = program.make ? program.make() : stack_of(3);
  for (size_t i = 0; i < model->size() && !program.root_only; i += 2) {
    fully_shard(*model[i], program.options);
  }
  fully_shard(*model, program.options).set_reshard_after_backward(!program.stays_whole);
  std::vector<at::Tensor> seen;
  for (int step = 0; step < steps; ++step) {
    model->zero_grad();
    auto loss = model->forward(subjects::data(rank(), step, {4, 6})).pow(2).mean();
    seen.push_back(loss.detach());
    loss.backward();
    program.before_write(model, step);
    some_ranks_are_slower(step);
    for (auto& parameter : parameters(*model)) {
      if (parameter.grad().defined()) {
        program.write(parameter);
      }
    }
    program.after_write(model, step);
  }
  for (const auto& parameter : parameters(*model)) {
    seen.push_back(sharded(parameter).full_tensor());
  }
  return seen;
}

// Both kinds of writes, everything else being equal.
void expect_no_difference(Program program) {
  program.write = with_an_operator;
  const auto expected = train(program);
  program.write = past_all_operators;
  expect_equal(train(program), expected);
}

Between evaluation_into(std::vector<at::Tensor>& seen) {
  return [&seen](nn::Sequential& model, int step) {
    const torch::NoGradGuard no_grad;
    seen.push_back(model->forward(subjects::data(0, step, {2, 6})));
  };
}

void expect_no_difference_in_evaluations(Program program) {
  std::vector<at::Tensor> expected;
  program.write = with_an_operator;
  program.after_write = evaluation_into(expected);
  train(program);
  std::vector<at::Tensor> actual;
  program.write = past_all_operators;
  program.after_write = evaluation_into(actual);
  train(program);
  expect_equal(actual, expected);
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    Freshness,
    ::testing::Values(
        Setting{"", 1}, Setting{"", 2}, Setting{"", 3}, Setting{"", 4}, Setting{"shm", 3}, Setting{"gloo", 2}),
    name_of);

TEST_P(Freshness, WritesThatNoOperatorShows) {
  on_ranks(GetParam(), [] {
    expect_no_difference({});
    expect_no_difference({.root_only = true});
    expect_no_difference({.options = {.reshard_after_forward = false}});
  });
}

TEST_P(Freshness, WritesThatNoOperatorShowsInMixedPrecision) {
  on_ranks(GetParam(), [] {
    expect_no_difference({.options = {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}}});
  });
}

TEST_P(Freshness, AnEvaluationAfterThem) {
  on_ranks(GetParam(), [] { expect_no_difference_in_evaluations({}); });
}

TEST_P(Freshness, AnEvaluationAfterThemOfWhatStaysWhole) {
  if (GetParam().backend == "gloo") {
    GTEST_SKIP() << "where gathers copy, what is kept whole has its former values";
  }
  on_ranks(GetParam(), [] {
    expect_no_difference_in_evaluations({.stays_whole = true});
    expect_no_difference_in_evaluations({.root_only = true, .stays_whole = true});
  });
}

// The first layer's backward does not read its weight, as its input needs no gradient.
TEST_P(Freshness, WritesBeforeAUnitIsUnshardedForTheNextStep) {
  on_ranks(GetParam(), [] {
    const Between unshard = [](nn::Sequential& model, int) { as_fsdp(*model[0]).unshard(); };
    expect_no_difference({.after_write = unshard});
    expect_no_difference(
        {.after_write = unshard,
         .options = {.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}}});
  });
}

TEST_P(Freshness, WritesThatChangeNothingOnSomeRanks) {
  on_ranks(GetParam(), [] {
    for (const auto make : {frozen_but_for_the_head, embedding_of_which_little_is_used}) {
      std::vector<at::Tensor> of_no_interest; // ranks that are slow may see what others write meanwhile
      expect_no_difference({.make = make});
      expect_no_difference({.before_write = evaluation_into(of_no_interest), .make = make});
      expect_no_difference_in_evaluations({.make = make});
    }
  });
}

TEST_P(Freshness, AllRanksLookBetweenBackwardAndTheWrites) {
  on_ranks(GetParam(), [] {
    const Between look = [](nn::Sequential& model, int step) {
      const torch::NoGradGuard no_grad;
      model[0]->as<nn::Linear>()->weight.norm();
      some_ranks_are_slower(step + 1);
    };
    expect_no_difference({.before_write = look});
  });
}

// Each of these makes memory that all ranks write and read once, while shards may be written and nobody says so.
TEST_P(Freshness, AllRanksGatherBetweenBackwardAndTheWrites) {
  on_ranks(GetParam(), [] {
    const Between ways[] = {
        [](nn::Sequential& model, int) {
          for (const auto& shard : parameters(*model)) {
            sharded(shard).full_grad();
          }
        },
        [](nn::Sequential& model, int) { const auto read_only = summon_full_params(*model, {.writeback = false}); },
        [](nn::Sequential& model, int) { fsdp::clone(model); },
        [](nn::Sequential&, int) { fully_shard(*nn::Linear(6, 6)); }};
    for (const Between& gather : ways) {
      expect_no_difference({.before_write = gather});
      expect_no_difference({.before_write = gather, .after_write = gather});
    }
  });
}

// The other's optimizer was seen. So the time that the first backward opens is over at the second's first gradient, and
// the rank that has nothing to write need not wait for gathers that the other, which reduces already, does not make.
TEST(FreshnessOfReplicas, TwoBackwardsBesideAnotherModelThatWasTrained) {
  on_threads(2, [] {
    nn::Sequential other = stack_of(1), model = stack_of(1);
    nn::Linear head(nn::LinearOptions(6, 1).bias(false)); // all of it is the first rank's
    model->push_back(head);
    model[0]->as<nn::Linear>()->weight.set_requires_grad(false);
    model[0]->as<nn::Linear>()->bias.set_requires_grad(false);
    fully_shard(*other);
    fully_shard(*model[0]);
    fully_shard(*model).set_separate_reduce_scatter_group(true);
    torch::optim::SGD optimizer(other->parameters(), 0.125), trains(head->parameters(), 0.125);
    for (int step = 0; step < 3; ++step) {
      other->forward(torch::ones({2, 6})).sum().backward();
      optimizer.step();
      for (int backward = 0; backward < 2; ++backward) {
        const auto x = torch::ones({2, 6});
        head->forward(rank() == 1 ? model[0]->as<nn::Linear>()->forward(x) : x).sum().backward();
      }
      trains.step();
    }
  });
}

// Of what it left unseen nobody is left to say that it is over; some ranks have no slice of the first weight.
TEST(FreshnessOfReplicas, ModelsAreShardedAfterOneThatNeverStepped) {
  for (const char* backend : {"", "shm"}) {
    on_ranks({backend, 4}, [] {
      const auto inner = init_device_mesh("cpu", {2, 2}, {"outer", "inner"})["inner"];
      const auto place = [&](const at::Tensor& tensor, const std::string&) {
        return tensor.dim() == 1 ? ShardPlacement{0, inner} : ShardPlacement{1};
      };
      for (int round = 0; round < 2; ++round) {
        {
          nn::Linear leaving(6, 6);
          fully_shard(*leaving);
          leaving->forward(torch::ones({2, 6})).sum().backward();
        }
        nn::Sequential model(nn::Linear(5, 7), nn::Linear(7, 2));
        for (const auto& layer : *model) {
          fully_shard(*layer.ptr(), {.shard_placement_fn = place});
        }
        for (int step = 0; step < 2; ++step) {
          model->forward(torch::ones({2, 5})).sum().backward();
          model->zero_grad();
        }
      }
    });
  }
}

// Ranks may drop a model at any time.
TEST_P(Freshness, OneRankLooksAfterAnotherModelIsGone) {
  if (GetParam().backend == "gloo") {
    GTEST_SKIP() << "over Gloo a gather is a collective";
  }
  on_ranks(GetParam(), [] {
    const auto other = std::make_shared<nn::Sequential>(nullptr);
    const Between look = [other](nn::Sequential& model, int) {
      *other = nullptr;
      if (rank() == 0) {
        const torch::NoGradGuard no_grad;
        model[2]->as<nn::Linear>()->weight.norm();
      }
      default_mesh().group()->exchange("", {"look", ""});
      *other = stack_of(1);
      fully_shard(**other);
      (*other)->forward(torch::ones({2, 6})).sum().backward();
    };
    expect_no_difference({.before_write = look});
  });
}

// Only where a gather asks nobody.
TEST_P(Freshness, OneRankLooksBetweenBackwardAndTheWrites) {
  if (GetParam().backend == "gloo") {
    GTEST_SKIP() << "over Gloo a gather is a collective";
  }
  on_ranks(GetParam(), [] {
    for (const bool recording : {false, true}) {
      const Between look = [recording](nn::Sequential& model, int step) {
        if (rank() == step % world_size()) {
          const torch::AutoGradMode mode(recording);
          model[2]->as<nn::Linear>()->weight.norm();
          some_ranks_are_slower(step);
        }
      };
      expect_no_difference({.before_write = recording ? kNothing : look, .after_write = kNothing});
      Program program{.write = with_an_operator};
      const auto expected = train(program);
      program.before_write = look;
      expect_equal(train(program), expected);
    }
  });
}

} // namespace
} // namespace fsdp::testing
