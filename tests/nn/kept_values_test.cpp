// Values and gradients that come from before, from beside, or from outside of a step, and must not get lost.

#include <torch/torch.h>

#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class KeptValues : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, KeptValues, ::testing::Values(1, 2, 3));

at::Tensor numbers(at::IntArrayRef sizes) {
  return torch::arange(1, c10::multiply_integers(sizes) + 1, torch::kFloat).view(sizes) / 3; // not exact in bfloat16
}

nn::Linear filled(int64_t in = 5, int64_t out = 3) {
  nn::Linear model(in, out);
  torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    parameter.copy_(numbers(parameter.sizes()));
  }
  return model;
}

at::Tensor whole_at(const nn::Module& module, size_t index) {
  return sharded(parameters(module)[index]).full_tensor();
}

TEST_P(KeptValues, WhatIsNotWrittenKeepsItsDigits) {
  on_threads(GetParam(), [] {
    auto model = filled();
    fully_shard(*model, {.mp_policy = {.param_dtype = torch::kBFloat16}});
    { const auto guard = summon_full_params(*model); }
    EXPECT_TRUE(torch::equal(whole_at(*model, 0), numbers({3, 5})));
    {
      torch::NoGradGuard no_grad;
      model->bias.zero_();
    }
    EXPECT_TRUE(torch::equal(whole_at(*model, 0), numbers({3, 5})));
    EXPECT_TRUE(torch::equal(whole_at(*model, 1), torch::zeros({3})));
  });
}

TEST_P(KeptValues, WritesFromBeforeAGuardThatWritesNothingBack) {
  for (const bool first_only : {false, true}) {
    on_threads(GetParam(), [&] {
      nn::Linear model(5, 3);
      fully_shard(*model);
      {
        torch::NoGradGuard no_grad;
        model->weight.fill_(2);
      }
      { const auto guard = summon_full_params(*model, {.writeback = false, .rank0_only = first_only}); }
      EXPECT_TRUE(torch::equal(whole_at(*model, 0), torch::full({3, 5}, 2.0)));
    });
  }
}

TEST_P(KeptValues, AFirstForwardInInferenceModeLeavesATrainableModel) {
  on_threads(GetParam(), [] {
    auto model = filled();
    fully_shard(*model);
    model->to(torch::kDouble);
    const auto x = torch::ones({1, 5}, torch::kDouble);
    {
      const c10::InferenceMode inference;
      model->forward(x);
    }
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    model->forward(x).sum().backward();
    for (const auto& shard : model->parameters()) {
      EXPECT_FALSE(shard.is_inference());
      EXPECT_TRUE(shard.grad().defined());
    }
    optimizer.step();
    EXPECT_TRUE(torch::allclose(whole_at(*model, 0), numbers({3, 5}).to(torch::kDouble) - 0.1));
  });
}

TEST_P(KeptValues, AnOperatorThatWritesOneUnitMayReadAnother) {
  on_threads(GetParam(), [] {
    nn::Sequential model(filled(4, 4), nn::Linear(4, 4));
    fully_shard(*model[0]);
    fully_shard(*model[1]);
    fully_shard(*model);
    const auto first = model[0]->as<nn::Linear>()->weight, second = model[1]->as<nn::Linear>()->weight;
    torch::NoGradGuard no_grad;
    second.copy_(first);
    EXPECT_TRUE(torch::equal(whole_at(*model, 2), numbers({4, 4})));
    at::_foreach_zero_({first, second});
    EXPECT_TRUE(torch::equal(whole_at(*model, 0), torch::zeros({4, 4})));
    EXPECT_TRUE(torch::equal(whole_at(*model, 2), torch::zeros({4, 4})));
    EXPECT_EQ(as_fsdp(*model[0]).unit()->held, 0);
  });
}

TEST_P(KeptValues, PartsOfAModelThatIsGone) {
  on_threads(GetParam(), [] {
    nn::Linear part(4, 4), other(4, 4);
    {
      nn::Sequential model(part, nn::LayerNorm(nn::LayerNormOptions({4})), other);
      fully_shard(*part);
      fully_shard(*other);
      fully_shard(*model);
      model->forward(torch::ones({2, 4})).sum().backward();
    }
    EXPECT_EQ(as_fsdp(*part).unit()->parent(), nullptr);
    other(part(torch::ones({2, 4}))).sum().backward();
    as_fsdp(*part).reset_iter_state();
    EXPECT_TRUE(part->parameters()[0].grad().defined());
  });
}

TEST_P(KeptValues, GradientsFromBeforeShardingAreNotAdded) {
  on_threads(GetParam(), [] {
    auto once = filled(), twice = filled();
    twice->forward(torch::ones({2, 5})).sum().backward();
    for (auto* model : {&once, &twice}) {
      fully_shard(**model);
      (*model)->forward(torch::ones({2, 5})).sum().backward();
    }
    const auto gradient = [](const nn::Linear& model) { return sharded(model->parameters()[0]).full_grad(); };
    EXPECT_TRUE(torch::equal(gradient(once), gradient(twice)));
  });
}

TEST_P(KeptValues, ShardsOfWhatIsShownWholeAreNotWritten) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    auto unit = fully_shard(*model);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    model->forward(torch::ones({2, 4})).sum().backward();
    {
      const auto guard = summon_full_params(*model);
      const auto said = error_message([&] { optimizer.step(); });
      EXPECT_TRUE(contains(said, "[write to shard] 'weight'")) << said;
    }
    EXPECT_EQ(unit.unit()->held, 0);
    optimizer.step();
  });
}

TEST_P(KeptValues, ShardsInAnotherDtypeAreKnownBeforeAnyOperator) {
  on_threads(GetParam(), [] {
    auto model = filled();
    fully_shard(*model);
    model->to(torch::kDouble);
    {
      const auto guard = summon_full_params(*model);
      EXPECT_TRUE(torch::equal(model->parameters()[0], numbers({3, 5}).to(torch::kDouble)));
    }
    EXPECT_EQ(whole_at(*model, 0).scalar_type(), torch::kDouble);
  });
}

TEST_P(KeptValues, AForwardAfterABackwardThatBrokeOff) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    auto unit = fully_shard(*model);
    const auto x = torch::ones({2, 4}).requires_grad_();
    x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("from a hook"); });
    EXPECT_THROW(model->forward(x * 2).sum().backward(), std::runtime_error);
    const auto said = error_message([&] { model->forward(torch::ones({2, 4})).sum().backward(); });
    EXPECT_TRUE(contains(said, "reset_iter_state()")) << said;
    unit.reset_iter_state();
    model->forward(torch::ones({2, 4})).sum().backward();
    EXPECT_TRUE(torch::equal(sharded(model->parameters()[1]).full_grad(), torch::full({4}, 2.0)));
  });
}

TEST_P(KeptValues, ParametersThatAreAddedWhileOthersAreShownWhole) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    fully_shard(*model);
    {
      const auto guard = summon_full_params(*model);
      for (int i = 0; i < 8; ++i) {
        model->register_parameter("extra" + std::to_string(i), torch::zeros({2}));
      }
    }
    EXPECT_TRUE(is_sharded(model->named_parameters()["weight"]));
    EXPECT_FALSE(is_sharded(model->named_parameters()["extra7"]));
  });
}

TEST_P(KeptValues, AShardIsNotWrittenFromAWholeParameter) {
  on_threads(GetParam(), [] {
    auto model = filled(4, 4);
    fully_shard(*model);
    auto shard = model->parameters()[1];
    torch::NoGradGuard no_grad;
    const auto rows = model->bias.narrow(0, 0, shard.numel());
    const auto said = error_message([&] { shard.add_(rows); });
    EXPECT_TRUE(contains(said, "writes the shard of 'bias' at once")) << said;
    shard.add_(rows.clone());
    EXPECT_EQ(whole_at(*model, 1).size(0), 4);
  });
}

TEST_P(KeptValues, OneOperatorForUnitsOfSeveralRoots) {
  on_threads(GetParam(), [] {
    nn::Linear alone = filled(4, 4);
    nn::Sequential model(filled(4, 4), filled(4, 4));
    fully_shard(*alone);
    for (auto& layer : *model) {
      fully_shard(*layer.ptr());
    }
    fully_shard(*model);
    torch::NoGradGuard no_grad;
    model[1]->as<nn::Linear>()->weight.fill_(0); // to be written when another one is touched
    const auto product = torch::mm(alone->weight, model[0]->as<nn::Linear>()->weight);
    EXPECT_TRUE(torch::equal(product, numbers({4, 4}).mm(numbers({4, 4}))));
  });
}

TEST_P(KeptValues, OneGuardWithinAnother) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 3);
    auto unit = fully_shard(*model);
    {
      const auto outer = summon_full_params(*model);
      { const auto inner = summon_full_params(*model); }
      torch::NoGradGuard no_grad;
      model->weight.fill_(2);
    }
    EXPECT_EQ(unit.unit()->held, 0);
    EXPECT_TRUE(torch::equal(whole_at(*model, 0), torch::full({3, 4}, 2.0)));
  });
}

TEST_P(KeptValues, OtherDataForAWholeParameter) {
  on_threads(GetParam(), [] {
    auto model = filled(4, 4);
    fully_shard(*model);
    const auto transposed = numbers({4, 4}).t();
    for (const bool offload : {false, true}) {
      {
        const auto guard = summon_full_params(*model, {.offload_to_cpu = offload});
        auto weight = model->parameters()[0];
        weight.set_data(weight.t()); // the same memory, read in another order
        auto bias = model->parameters()[1];
        bias.set_data(torch::full({4}, 7.0)); // other memory
        EXPECT_EQ(model->weight.detach().sum().item<float>(), transposed.sum().item<float>());
      }
      EXPECT_TRUE(torch::equal(whole_at(*model, 0), offload ? numbers({4, 4}) : transposed));
      EXPECT_TRUE(torch::equal(whole_at(*model, 1), torch::full({4}, 7.0)));
    }
  });
}

TEST_P(KeptValues, WritesAfterOtherDataWereGiven) {
  on_threads(GetParam(), [] {
    const torch::NoGradGuard no_grad;
    auto model = filled(4, 4);
    fully_shard(*model);
    const auto given = numbers({4, 4}).t();
    {
      const auto guard = summon_full_params(*model);
      auto weight = model->parameters()[0];
      weight.set_data(given);
      weight.mul_(2);
      EXPECT_TRUE(torch::equal(model->weight + 0, given * 2));
      model->weight.add_(1);
      EXPECT_TRUE(torch::equal(weight, given * 2 + 1));
    }
    EXPECT_TRUE(torch::equal(whole_at(*model, 0), given * 2 + 1));
    EXPECT_TRUE(torch::equal(given, numbers({4, 4}).t()));
  });
}

void exchange_data(at::Tensor first, at::Tensor second) {
  const at::Tensor former = first.variable_data();
  first.set_data(second.variable_data());
  second.set_data(former);
}

TEST_P(KeptValues, DataThatWholeParametersExchange) {
  on_threads(GetParam(), [] {
    nn::Sequential model(filled(4, 4), nn::Linear(4, 4));
    fully_shard(*model[0]); // between units
    fully_shard(*model);
    const auto first = numbers({4, 4}), second = whole_at(*model, 2);
    for (const bool offload : {false, true}) {
      {
        const auto guard = summon_full_params(*model, {.offload_to_cpu = offload});
        exchange_data(model->parameters()[0], model->parameters()[2]);
        exchange_data(model->parameters()[1], model->parameters()[3]);
        EXPECT_TRUE(torch::equal(model[0]->as<nn::Linear>()->weight + 0, offload ? first : second));
      }
      EXPECT_TRUE(torch::equal(whole_at(*model, 0), offload ? first : second));
      EXPECT_TRUE(torch::equal(whole_at(*model, 2), offload ? second : first));
    }
  });
}

TEST_P(KeptValues, DataThatWholeParametersOfTwoModelsExchange) {
  on_threads(GetParam(), [] {
    auto model = filled(4, 4);
    nn::Linear other(4, 4);
    fully_shard(*model);
    fully_shard(*other);
    const auto former = numbers({4, 4}), of_other = whole_at(*other, 0);
    for (const bool in_order : {true, false}) {
      auto guard = summon_full_params(*model), guard_of_other = summon_full_params(*other);
      exchange_data(model->parameters()[0], other->parameters()[0]);
      (in_order ? guard : guard_of_other).end();
      EXPECT_TRUE(torch::equal((in_order ? other : model)->parameters()[0], former)) << "of a guard that goes on";
      EXPECT_TRUE(torch::equal((in_order ? other : model)->weight + 0, former));
      (in_order ? guard_of_other : guard).end();
      EXPECT_TRUE(torch::equal(whole_at(*model, 0), in_order ? of_other : former));
      EXPECT_TRUE(torch::equal(whole_at(*other, 0), in_order ? former : of_other));
    }
  });
}

TEST_P(KeptValues, DataGivenToAWholeParameterAreItsMembersAtOnce) {
  on_threads(GetParam(), [] {
    const MixedPrecisionPolicy bf16{.param_dtype = torch::kBFloat16};
    for (const auto& options : {FullyShardOptions(), FullyShardOptions{.mp_policy = bf16}}) {
      for (const auto& data : {numbers({4, 4}), numbers({4, 4}).t(), numbers({4, 4}).to(torch::kDouble)}) {
        nn::Linear model(4, 4);
        fully_shard(*model, options);
        {
          const auto guard = summon_full_params(*model);
          model->parameters()[0].set_data(data.clone());
          EXPECT_TRUE(torch::equal(model->weight + 0, data.to(torch::kFloat)));
        }
        EXPECT_TRUE(torch::equal(whole_at(*model, 0), data.to(torch::kFloat)));
      }
    }
  });
}

TEST_P(KeptValues, DataGivenInOneOfTwoGuardsThatShowPartsOfAUnit) {
  on_threads(GetParam(), [] {
    for (const bool in_inner : {true, false}) {
      nn::Sequential model(filled(4, 4), filled(4, 4));
      fully_shard(*model);
      auto values = torch::full({4, 4}, 2.0);
      auto outer = summon_full_params(*model[0]);
      auto inner = summon_full_params(*model[1]);
      model[in_inner ? 1 : 0]->parameters()[0].set_data(values);
      inner.end();
      outer.end();
      EXPECT_TRUE(torch::equal(whole_at(*model, in_inner ? 2 : 0), values));
      EXPECT_TRUE(torch::equal(whole_at(*model, in_inner ? 0 : 2), numbers({4, 4})));
      EXPECT_TRUE(torch::equal(values, torch::full({4, 4}, 2.0)));
    }
  });
}

TEST_P(KeptValues, DataThatGoAfterTheyWereGiven) {
  on_threads(GetParam(), [] {
    auto model = filled(4, 4);
    fully_shard(*model);
    {
      const auto guard = summon_full_params(*model);
      auto values = torch::full({4, 4}, 2.0);
      model->parameters()[0].set_data(values);
      values.fill_(7);
      values.resize_({100000});
      EXPECT_TRUE(torch::equal(model->weight + 0, torch::full({4, 4}, 2.0)));
    }
    EXPECT_TRUE(torch::equal(whole_at(*model, 0), torch::full({4, 4}, 2.0)));
  });
}

TEST_P(KeptValues, WritesToWhatIsShownWhileItsUnitIsResharded) {
  for (const bool writes_back : {true, false}) {
    on_threads(GetParam(), [&] {
      auto model = filled(4, 4);
      auto unit = fully_shard(*model);
      {
        const auto guard = summon_full_params(*model, {.writeback = writes_back});
        const torch::NoGradGuard no_grad;
        model->parameters()[0].fill_(2);
        unit.reshard();
        EXPECT_TRUE(torch::equal(model->weight + 0, torch::full({4, 4}, 2.0)));
        model->parameters()[0].add_(1);
      }
      EXPECT_TRUE(torch::equal(whole_at(*model, 0), writes_back ? torch::full({4, 4}, 3.0) : numbers({4, 4})));
      EXPECT_EQ(unit.unit()->whole_bytes(), 0);
    });
  }
}

TEST_P(KeptValues, WritesThatNoUnitHasTakenYetSurviveAReset) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 3);
    auto unit = fully_shard(*model);
    {
      torch::NoGradGuard no_grad;
      model->weight.fill_(2);
    }
    unit.reset_iter_state();
    EXPECT_TRUE(torch::equal(whole_at(*model, 0), torch::full({3, 4}, 2.0)));
  });
}

TEST_P(KeptValues, WhatAnOperatorWritesToIsTheUsersTensor) {
  on_threads(GetParam(), [] {
    auto model = filled(4, 4);
    fully_shard(*model, {.mp_policy = {.param_dtype = torch::kBFloat16}});
    torch::NoGradGuard no_grad;
    const auto x = torch::eye(4);
    auto out = torch::zeros({4, 4});
    EXPECT_THROW(torch::mm_out(out, x, model->weight), c10::Error); // torch wants an `out` of the operator's dtype
    out = out.to(torch::kBFloat16);
    torch::mm_out(out, x, model->weight);
    EXPECT_TRUE(torch::equal(out, numbers({4, 4}).to(torch::kBFloat16)));
  });
}

TEST_P(KeptValues, ReductionsInFlightFindTheNewRoot) {
  on_threads(GetParam(), [] {
    auto model = filled(4, 4);
    auto unit = fully_shard(*model);
    unit.set_is_last_backward(false);
    model->forward(torch::ones({2, 4})).sum().backward();
    EXPECT_EQ(unit.unit()->runtime().reducer().in_flight(), 1);
    nn::Sequential outer(model);
    fully_shard(*outer);
    EXPECT_TRUE(torch::equal(sharded(model->parameters()[1]).full_grad(), torch::full({4}, 2.0)));
  });
}

TEST_P(KeptValues, ReadingWhatIsInNoGraphIsNoStep) {
  on_threads(GetParam(), [] {
    auto model = filled(4, 4);
    auto unit = fully_shard(*model);
    EXPECT_EQ(model->weight.detach().sum().item<float>(), numbers({4, 4}).sum().item<float>());
    EXPECT_FALSE(unit.unit()->runtime().in_forward());
    {
      torch::NoGradGuard no_grad;
      model->weight.zero_(); // would be an error in a step
    }
    (model->forward(torch::ones({2, 4})) + model->weight.detach().sum()).sum().backward();
    EXPECT_TRUE(torch::equal(sharded(model->parameters()[1]).full_grad(), torch::full({4}, 2.0)));
    EXPECT_TRUE(torch::equal(sharded(model->parameters()[0]).full_grad(), torch::full({4, 4}, 2.0)));
  });
}

TEST_P(KeptValues, AGradientThatIsLaidOutInAnotherOrder) {
  on_threads(GetParam(), [] {
    auto model = filled(4, 6);
    fully_shard(*model);
    model->forward(torch::arange(4, torch::kFloat).view({1, 4})).sum().backward();
    auto shard = model->parameters()[0];
    const auto expected = sharded(shard).full_grad();
    shard.mutable_grad() = shard.grad().t().contiguous().t();
    EXPECT_TRUE(torch::equal(sharded(shard).full_grad(), expected));
    EXPECT_TRUE(torch::equal(expected[0], torch::arange(4, torch::kFloat)));
  });
}

} // namespace
} // namespace fsdp::testing
