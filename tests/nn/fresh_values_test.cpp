// What is read is what was given, announced, sent or written through a member last; and what is left after it.

#include <sstream>

#include "nn/freshness.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

TEST_P(Freshness, WritesBetweenEvaluationsThatWereAnnounced) {
  on_ranks(GetParam(), [] {
    nn::Sequential model = stack_of(2);
    fully_shard(*model[0]);
    auto root = fully_shard(*model);
    const torch::NoGradGuard no_grad;
    const auto x = torch::ones({2, 6});
    for (int step = 0; step < 4; ++step) {
      model->forward(x);
      root.note_shard_writes();
      some_ranks_are_slower(step);
      for (auto& parameter : parameters(*model)) {
        std::fill_n(parameter.data_ptr<float>(), parameter.numel(), static_cast<float>(step));
      }
      const auto first = model[0]->as<nn::Linear>()->forward(x);
      EXPECT_TRUE(first.eq(7 * step).all().item<bool>()) << first;
    }
  });
}

// Shards are new, or have just been written by us: whoever fills them with values of a file tells nobody.
TEST_P(Freshness, ValuesThatAreGivenAfterACallOfOurs) {
  on_ranks(GetParam(), [] {
    const Between calls[] = {
        kNothing, // but fully_shard
        [](nn::Sequential& model, int) { to_empty(*model); },
        [](nn::Sequential& model, int) {
          const auto guard = summon_full_params(*model);
          const torch::NoGradGuard no_grad;
          model->parameters()[0].zero_();
        },
        [](nn::Sequential& model, int) { fsdp::clone(model); }};
    for (size_t i = 0; i < std::size(calls); ++i) {
      for (int turn = 0; turn < 2 * world_size(); ++turn) {
        nn::Sequential model = stack_of(2, /*width=*/8); // of which each rank has a part
        if (i == 1) {
          move_to_meta(*model);
        }
        fully_shard(*model[0]);
        fully_shard(*model);
        calls[i](model, turn);
        some_ranks_are_slower(turn);
        for (auto& parameter : parameters(*model)) {
          std::fill_n(parameter.data_ptr<float>(), parameter.numel(), 1.0F);
        }
        const torch::AutoGradMode mode(turn < world_size());
        const auto first = model[0]->as<nn::Linear>()->forward(torch::ones({2, 8}));
        EXPECT_TRUE(first.eq(9).all().item<bool>()) << "call " << i << ", turn " << turn << ": " << first;
      }
    }
  });
}

// It is the next step's as much as what a prefetch gathers.
TEST_P(Freshness, WritesToWhatWasUnshardedForAStepThatDidNotUseIt) {
  on_ranks(GetParam(), [] {
    for (const bool casts : {false, true}) {
      FullyShardOptions options;
      if (casts) {
        options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
      }
      nn::Sequential model = stack_of(2);
      fully_shard(*model[0], options);
      auto second = fully_shard(*model[2], options);
      fully_shard(*model, options);
      for (int step = 1; step < 4; ++step) {
        second.unshard();
        model[0]->as<nn::Linear>()->forward(torch::ones({2, 6})).sum().backward();
        some_ranks_are_slower(step);
        for (auto& shard : parameters(*model)) {
          std::fill_n(shard.data_ptr<float>(), shard.numel(), static_cast<float>(step));
        }
        const auto y = model[2]->as<nn::Linear>()->forward(torch::ones({2, 6}));
        EXPECT_TRUE(y.eq(7 * step).all().item<bool>()) << "step " << step << ": " << y;
        y.sum().backward();
        model->zero_grad();
      }
    }
  });
}

void fill_shards(const nn::Module& module, int value) {
  for (auto& shard : module.parameters()) {
    shard.fill_(value);
  }
}

// Each rank has two rows of the weight and two elements of the bias.
void expect_values(nn::Linear& model, const std::function<int(int)>& of_rank) {
  const auto result = model->forward(torch::ones({1, 6}));
  for (int64_t i = 0; i < result.numel(); ++i) {
    EXPECT_EQ(result[0][i].item<float>(), 7 * of_rank(static_cast<int>(i / 2))) << i;
  }
}

TEST_P(Freshness, CollectivesOfOursOnShards) {
  on_ranks(GetParam(), [] {
    const int ranks = world_size();
    nn::Linear model(6, 2 * ranks);
    fully_shard(*model);
    const torch::NoGradGuard no_grad;
    for (int step = 1; step < 4; ++step) {
      fill_shards(*model, rank() + step);
      expect_values(model, [&](int rank) { return rank + step; });
      some_ranks_are_slower(step);
      for (auto& shard : model->parameters()) {
        default_mesh().group()->all_reduce(shard, ReduceOp::kSum, 1, {"sum", ""})->wait();
      }
      expect_values(model, [&](int) { return ranks * (ranks - 1) / 2 + ranks * step; });
      fill_shards(*model, rank() + step);
      expect_values(model, [&](int rank) { return rank + step; });
      some_ranks_are_slower(step);
      for (auto& shard : model->parameters()) {
        default_mesh().group()->broadcast(shard, ranks - 1, {"take", ""});
      }
      expect_values(model, [&](int) { return ranks - 1 + step; });
    }
  });
}

// As LocalSGD: each replica is sharded by itself.
TEST(FreshnessOfReplicas, AveragesOfTheirShards) {
  for (const char* backend : {"", "shm", "gloo"}) {
    on_ranks({backend, 4}, [] {
      const auto mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
      nn::Linear model(6, 4);
      fully_shard(*model, {.mesh = mesh["shard"]});
      const torch::NoGradGuard no_grad;
      const int replica = rank() / 2;
      for (int step = 1; step < 4; ++step) {
        fill_shards(*model, rank() + step);
        expect_values(model, [&](int rank) { return 2 * replica + rank + step; });
        some_ranks_are_slower(step);
        for (auto& shard : model->parameters()) {
          mesh["replicate"].group()->all_reduce(shard, ReduceOp::kSum, 2, {"average", ""})->wait();
        }
        expect_values(model, [&](int rank) { return 1 + rank + step; });
      }
    });
  }
}

TEST_P(Freshness, AShardHasWhatWasWrittenThroughAMember) {
  on_ranks(GetParam(), [] {
    nn::Linear model(5, 3);
    fully_shard(*model);
    {
      const torch::NoGradGuard no_grad;
      model->weight.fill_(7);
      model->bias.add_(1).fill_(7);
    }
    for (const auto& shard : model->parameters()) {
      for (int64_t i = 0; i < shard.numel(); ++i) {
        EXPECT_EQ(shard.data_ptr<float>()[i], 7);
      }
      std::stringstream file;
      torch::save(shard, file);
      at::Tensor loaded;
      torch::load(loaded, file);
      EXPECT_TRUE(loaded.eq(7).all().item<bool>());
    }
  });
}

TEST_P(Freshness, OneRankLooksAtWhatIsWholeWithinAStep) {
  on_ranks(GetParam(), [] {
    const auto run = [](bool looks) {
      nn::Sequential model = stack_of(3);
      for (size_t i = 0; i < model->size(); i += 2) {
        fully_shard(*model[i]);
      }
      fully_shard(*model);
      std::vector<at::Tensor> seen;
      for (int step = 0; step < 5; ++step) {
        model->zero_grad();
        at::Tensor x = subjects::data(rank(), step, {4, 6});
        for (size_t i = 0; i < model->size(); i += 2) {
          auto* layer = model[i]->as<nn::Linear>();
          x = layer->forward(x).tanh();
          if (looks && rank() == 0) {
            const torch::NoGradGuard no_grad;
            layer->weight.norm();
          }
        }
        auto loss = x.pow(2).mean();
        seen.push_back(loss.detach());
        loss.backward();
        for (auto& parameter : parameters(*model)) {
          with_an_operator(parameter);
        }
      }
      return seen;
    };
    const auto expected = run(false);
    expect_equal(run(true), expected);
  });
}

TEST_P(Freshness, ASecondBackwardAfterABrokenOneIsTheSameError) {
  on_ranks(GetParam(), [] {
    nn::Sequential model = stack_of(2);
    fully_shard(*model[0]);
    auto root = fully_shard(*model);
    auto x = torch::ones({2, 6}).requires_grad_();
    auto hidden = model[0]->as<nn::Linear>()->forward(x);
    bool breaks = true;
    hidden.register_hook([&breaks](const at::Tensor&) -> at::Tensor {
      if (breaks) {
        throw std::runtime_error("from a hook");
      }
      return {};
    });
    auto loss = model[2]->as<nn::Linear>()->forward(hidden.tanh()).sum();
    EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), std::runtime_error);
    breaks = false;
    const std::string reason = "the last backward broke off in the middle, and has left gradients behind";
    const auto backwards = error_message([&] { loss.backward(); });
    const auto forwards = error_message([&] { model->forward(torch::ones({2, 6})); });
    EXPECT_TRUE(contains(backwards, reason) && contains(backwards, "reset_iter_state()")) << backwards;
    EXPECT_EQ(backwards.substr(backwards.find(reason)), forwards.substr(forwards.find(reason)));
    root.reset_iter_state();
    model->zero_grad();
    model->forward(torch::ones({2, 6})).sum().backward();
  });
}

} // namespace
} // namespace fsdp::testing
