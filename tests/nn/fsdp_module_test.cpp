// The rows of the FSDP2 table.

#include <torch/csrc/autograd/function_hook.h>

#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;
using engine::EventKind;
using engine::UnitState;

class FsdpModule : public ::testing::TestWithParam<int> {
 protected:
  /// Training is the same with the setters called.
  void train_with(std::function<void(Subject&, FSDPModule&)> prepare, FullyShardOptions options = {}) {
    expect_parity(
        {.make = [] { return subjects::tied(); }, .options = std::move(options), .prepare = std::move(prepare)},
        GetParam());
  }
};

std::vector<FSDPModule> units_of(const Subject& subject) {
  std::vector<FSDPModule> units;
  for (const auto& part : subject.parts) {
    units.push_back(as_fsdp(*part));
  }
  return units;
}

TEST_P(FsdpModule, ExplicitPrefetch) {
  train_with([](Subject& subject, FSDPModule& root) {
    auto units = units_of(subject);
    root.set_modules_to_forward_prefetch({units[0], units[1]});
    units[0].set_modules_to_forward_prefetch({units[1], units[2]});
    units[2].set_modules_to_backward_prefetch({units[1], units[0]});
  });
}

TEST_P(FsdpModule, CustomCollectives) {
  train_with([](Subject&, FSDPModule& root) {
    root.set_custom_all_gather([](at::Tensor& output, const at::Tensor& input, Group& group) {
      auto home = group.make_home(
          {{output.numel(), input.numel(), input.scalar_type(), input.scalar_type()}}, {}, {"custom", ""});
      home->begin_write({"custom", ""});
      torch::from_blob(home->slice(0), {input.numel()}, input.options()).copy_(input);
      auto gathered = home->gather({"custom", ""});
      gathered->wait();
      output.copy_(torch::from_blob(gathered->piece(0), {output.numel()}, output.options()));
      group.barrier({"custom", ""});
    });
    root.set_custom_reduce_scatter([](at::Tensor& output, const at::Tensor& input, Group& group) {
      group.reduce_scatter({{input.clone()}, {{input.numel(), output.numel()}}, {output}}, {"custom", ""})->wait();
    });
  });
}

TEST_P(FsdpModule, ReshardPoliciesChangeNoBit) {
  for (bool after_forward : {true, false}) {
    for (bool after_backward : {true, false}) {
      train_with([&](Subject&, FSDPModule& root) {
        root.set_reshard_after_forward(after_forward);
        root.set_reshard_after_backward(after_backward);
      });
    }
  }
}

TEST_P(FsdpModule, SchedulingKnobsChangeNoBit) {
  train_with([](Subject& subject, FSDPModule& root) {
    root.set_reduce_scatter_max_input_buffers(2);
    root.set_separate_reduce_scatter_group(true);
    root.set_force_sum_reduction_for_comms(true);
    root.set_allocate_memory_from_process_group_for_comm(true);
    as_fsdp(*subject.parts[0]).set_unshard_in_backward(false);
  });
}

TEST_P(FsdpModule, AllReduceHookSeesTheReducedGradients) {
  std::atomic<int> calls{0};
  train_with([&](Subject&, FSDPModule& root) {
    root.set_all_reduce_hook([&](at::Tensor&) {
      const at::Tensor matrix = torch::ones({2, 2});
      EXPECT_EQ(torch::mm(matrix, matrix).scalar_type(), torch::kFloat) << "autocast, which is off, took place";
      ++calls;
    });
  });
  EXPECT_GT(calls, 0);
}

TEST_P(FsdpModule, IgnoredParametersStayAsTheyAre) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    auto bias = model->bias;
    fully_shard(*model, {.ignored_params = {bias}});
    EXPECT_FALSE(is_sharded(model->bias));
    EXPECT_EQ(model->parameters()[1].unsafeGetTensorImpl(), bias.unsafeGetTensorImpl());
    EXPECT_TRUE(is_sharded(model->parameters()[0]));
  });
}

TEST_P(FsdpModule, ShardsAreThoseOfTorchChunk) {
  on_threads(GetParam(), [] {
    auto weight = torch::arange(35, torch::kFloat).view({7, 5});
    nn::Linear model(5, 7);
    model->weight.set_data(weight.clone());
    fully_shard(*model);
    const auto chunks = weight.chunk(world_size());
    const auto shard = model->parameters()[0];
    if (rank() < static_cast<int>(chunks.size())) {
      EXPECT_TRUE(torch::equal(shard, chunks[rank()]));
    } else {
      EXPECT_EQ(shard.sizes(), (std::vector<int64_t>{0, 5}));
    }
    EXPECT_EQ(model->weight.sizes(), weight.sizes());
    EXPECT_TRUE(torch::equal(model->weight, weight));
    EXPECT_TRUE(torch::equal(sharded(shard).full_tensor(), weight));
    EXPECT_EQ(sharded(shard).sizes, weight.sizes().vec());
    EXPECT_EQ(sharded(shard).placements.size(), 1u);
    EXPECT_EQ(sharded(shard).placements[0].shard_dim, 0);
  });
}

TEST_P(FsdpModule, UnshardHoldsUntilReshard) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    auto first = fully_shard(*model[0]), second = fully_shard(*model[1]);
    fully_shard(*model);
    first.unshard();
    EXPECT_EQ(first.unit()->state(), UnitState::kWhole);
    EXPECT_NO_THROW(model[0]->as<nn::Linear>()->weight.const_data_ptr<float>());
    auto handle = second.unshard(/*async_op=*/true);
    handle.wait();
    handle.wait();
    first.reshard();
    second.reshard();
    EXPECT_EQ(first.unit()->state(), UnitState::kSharded);
    EXPECT_EQ(second.unit()->state(), UnitState::kSharded);
  });
}

// A frozen part whose blocks the program fetches itself, while gradients are accumulated.
TEST_P(FsdpModule, WhatWasUnshardedGoesAfterABackwardThatReducesNothing) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    model[0]->as<nn::Linear>()->weight.requires_grad_(false);
    model[0]->as<nn::Linear>()->bias.requires_grad_(false);
    const FullyShardOptions cast{.mp_policy = {.param_dtype = at::kDouble}};
    auto frozen = fully_shard(*model[0], cast);
    auto root = fully_shard(*model, cast);
    root.set_requires_gradient_sync(false);
    frozen.unshard();
    torch::Tensor features;
    {
      torch::NoGradGuard no_grad;
      features = model[0]->as<nn::Linear>()->forward(torch::ones({2, 4}, at::kDouble));
    }
    model[1]->as<nn::Linear>()->forward(features).sum().backward();
    EXPECT_EQ(frozen.unit()->state(), UnitState::kSharded);
  });
}

// Which brings no gradient of the model's: one rank may do that alone.
TEST_P(FsdpModule, WhatWasUnshardedStaysWhenOneRankLooksAtTheGradientOfAnInput) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    const FullyShardOptions cast{.mp_policy = {.param_dtype = at::kDouble}};
    auto first = fully_shard(*model[0], cast), second = fully_shard(*model[1], cast);
    fully_shard(*model, cast);
    first.set_reshard_after_forward(false);
    first.set_reshard_after_backward(false);
    const auto x = torch::ones({2, 4}, at::kDouble).requires_grad_();
    const auto features = model[0]->as<nn::Linear>()->forward(x);
    second.unshard();
    if (rank() == 0) {
      torch::autograd::grad({features.sum()}, {x});
    }
    EXPECT_EQ(second.unit()->state(), UnitState::kWhole);
    model->forward(x).sum().backward();
  });
}

TEST_P(FsdpModule, GradientDivideFactorIsTheUnitsOwn) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    auto first = fully_shard(*model[0]);
    fully_shard(*model);
    first.set_gradient_divide_factor(0.5 * world_size());
    {
      torch::NoGradGuard no_grad;
      for (auto& p : model->parameters()) {
        p.fill_(0.25);
      }
    }
    model->forward(torch::ones({2, 4})).sum().backward();
    // d loss / d bias of the last layer is the batch; of the first: batch * 4 * 0.25.
    auto last = sharded(model->named_parameters()["1.bias"]).full_grad();
    auto before = sharded(model->named_parameters()["0.bias"]).full_grad();
    EXPECT_TRUE(torch::equal(last, torch::full({4}, 2.0)));
    EXPECT_TRUE(torch::equal(before, torch::full({4}, 4.0)));
  });
}

TEST_P(FsdpModule, UnusedParametersTakePartAsZerosOnRequest) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    fully_shard(*model[0]);
    fully_shard(*model[1]);
    auto root = fully_shard(*model);
    root.set_reduce_scatter_unused_params(true);
    // Each rank uses another layer.
    model[rank() % 2]->as<nn::Linear>()->forward(torch::ones({2, 4})).sum().backward();
    for (const auto& item : model->named_parameters()) {
      ASSERT_TRUE(item.value().grad().defined()) << item.key();
    }
    const int users = (world_size() + 1) / 2; // ranks 0, 2, ...
    auto grad = sharded(model->named_parameters()["0.bias"]).full_grad();
    EXPECT_TRUE(torch::allclose(grad, torch::full({4}, 2.0 * users / world_size())));
  });
}

// What an earlier micro-batch left to be all-reduced is not forgotten when the last one does not use the parameter.
TEST(HybridFsdpModule, PutOffGradientsArriveThoughTheLastBackwardHasNone) {
  on_threads(4, [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    const Mesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    fully_shard(*model[0], {.mesh = mesh});
    fully_shard(*model[1], {.mesh = mesh});
    auto root = fully_shard(*model, {.mesh = mesh});
    const auto use = [&](int i) { model[i]->as<nn::Linear>()->forward(torch::ones({2, 4})).sum().backward(); };
    root.set_reduce_scatter_max_input_buffers(2);
    for (const bool waited_for : {true, false}) { // or still on their way when the last backward ends
      model->zero_grad();
      root.set_requires_all_reduce(false);
      root.set_is_last_backward(waited_for);
      use(0);
      root.set_requires_all_reduce(true);
      root.set_is_last_backward(true);
      use(1);
      for (const auto& name : {"0.bias", "1.bias"}) {
        const auto gradient = sharded(model->named_parameters()[name]).full_grad();
        EXPECT_TRUE(torch::equal(gradient, torch::full({4}, 2.0))) << name << ' ' << waited_for;
      }
    }
  });
}

TEST_P(FsdpModule, PostAccumulateGradHooksOfShardsRunOnce) {
  struct CountHook : torch::autograd::PostAccumulateGradHook {
    explicit CountHook(int* count) : count(count) {}
    void operator()(const torch::autograd::Variable& shard) override {
      EXPECT_TRUE(shard.grad().defined());
      torch::NoGradGuard no_grad;
      shard.detach().sub_(shard.grad(), 0.1); // the optimizer in backward
      shard.mutable_grad().reset();
      ++*count;
    }
    int* count;
  };
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4), nn::Linear(4, 4));
    for (auto& layer : *model) {
      fully_shard(*layer.ptr());
    }
    fully_shard(*model);
    std::vector<int> counts(6);
    auto shards = model->parameters();
    for (size_t i = 0; i < shards.size(); ++i) {
      torch::autograd::impl::set_post_acc_grad_hooks(shards[i], std::make_unique<CountHook>(&counts[i]));
    }
    for (int step = 0; step < 2; ++step) {
      model->forward(torch::ones({2, 4})).pow(2).mean().backward();
    }
    EXPECT_EQ(counts, std::vector<int>(6, 2));
  });
}

TEST_P(FsdpModule, AnExceptionInForwardIsForgottenByResetIterState) {
  on_threads(GetParam(), [] {
    Trial trial{.make = [] { return subjects::mlp(); }};
    auto subject = make_seeded(trial);
    barrier();
    for (auto& part : subject.parts) {
      fully_shard(*part);
    }
    auto root = fully_shard(*subject.module);
    auto whole_step = [&] {
      subject.module->zero_grad();
      subject.loss(0, 0).backward();
      return sharded(subject.module->parameters()[0]).full_grad();
    };
    const auto wanted = whole_step();
    {
      auto* first = subject.parts[0]->as<nn::Linear>();
      auto hidden = first->forward(torch::ones({2, 7}));
      EXPECT_ANY_THROW(first->forward(hidden)); // sizes do not fit
    }
    root.reset_iter_state();
    EXPECT_TRUE(torch::equal(whole_step(), wanted));
    {
      auto loss = subject.loss(0, 0) * 1;
      loss.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("in backward"); });
      EXPECT_ANY_THROW(loss.backward());
    }
    {
      auto* last = subject.parts[1]->as<nn::Linear>();
      auto hidden = subject.parts[0]->as<nn::Linear>()->forward(torch::ones({2, 7}));
      hidden.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("in the middle of backward"); });
      EXPECT_ANY_THROW(last->forward(hidden).sum().backward());
    }
    root.reset_iter_state();
    EXPECT_TRUE(torch::equal(whole_step(), wanted));
  });
}

TEST_P(FsdpModule, ShareCommCtxJoinsTwoRoots) {
  on_threads(GetParam(), [] {
    nn::Linear first(4, 4), second(4, 4);
    auto a = fully_shard(*first), b = fully_shard(*second);
    share_comm_ctx({a, b});
    EXPECT_EQ(a.unit()->shared_runtime(), b.unit()->shared_runtime());
    second(first(torch::ones({2, 4}))).sum().backward();
    EXPECT_TRUE(first->parameters()[0].grad().defined());
    EXPECT_TRUE(second->parameters()[0].grad().defined());
  });
}

TEST_P(FsdpModule, ListOfModulesIsOneUnit) {
  expect_parity({.make = [] { return subjects::tied(); }, .shard_parts = false, .prepare = nullptr}, GetParam());
  on_threads(GetParam(), [] {
    nn::Linear norm(4, 4), head(4, 4);
    auto both = fully_shard(std::vector<nn::Module*>{norm.get(), head.get()});
    EXPECT_EQ(as_fsdp(*norm).unit(), as_fsdp(*head).unit());
    EXPECT_EQ(both.unit()->params().size(), 4u);
    head(norm(torch::ones({2, 4}))).sum().backward();
    EXPECT_TRUE(head->parameters()[1].grad().defined());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, FsdpModule, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
