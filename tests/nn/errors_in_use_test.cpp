// Every mistake with what is sharded has a message that says what to do.

#include "engine/internal_scope.h"
#include "nn/expect_error.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

TEST(ErrorsInUse, AWriteToAHandleInTheMiddleOfAStep) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model);
        auto loss = model->forward(torch::ones({2, 4})).sum();
        torch::NoGradGuard no_grad;
        model->weight.zero_();
      },
      {"'weight' was written between the beginning of a forward and the end of its backward", "reset_iter_state"});
}

TEST(ErrorsInUse, RawAccessToAHollowHandle) {
#ifndef FSDP_HAS_DATA_PTR_GUARD
  GTEST_SKIP() << "this LibTorch cannot say whose memory it is that is not there";
#endif
  for (bool is_const : {true, false}) {
    expect_error(
        2,
        [&] {
          nn::Linear model(4, 4);
          fully_shard(*model);
          is_const ? static_cast<const void*>(model->weight.const_data_ptr<float>())
                   : model->weight.mutable_data_ptr<float>();
        },
        {"raw access to the parameter 'weight'", "summon_full_params"});
  }
}

TEST(ErrorsInUse, RawAccessIsRefusedByThePresentNameAfterEachUse) {
#ifndef FSDP_HAS_DATA_PTR_GUARD
  GTEST_SKIP() << "this LibTorch cannot say whose memory it is that is not there";
#endif
  on_threads(2, [] {
    const auto expect_refused = [](const at::Tensor& handle, const std::string& name) {
      for (int i = 0; i < 2; ++i) {
        EXPECT_TRUE(contains(message_of([&] { handle.const_data_ptr(); }), "the parameter '" + name + "'"));
      }
    };
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
    const auto first = model[0]->as<nn::Linear>()->weight, second = model[1]->as<nn::Linear>()->weight;
    fully_shard(*model[0]);
    FSDPModule unit = fully_shard(*model[1]);
    expect_refused(first, "weight");
    unit.unshard();
    EXPECT_NE(second.const_data_ptr(), nullptr);
    fully_shard(*model);
    expect_refused(first, "0.weight");
    unit.reshard();
    expect_refused(second, "1.weight");
    for (int step = 0; step < 3; ++step) {
      model->forward(torch::ones({2, 4})).sum().backward();
      expect_refused(first, "0.weight");
      expect_refused(second, "1.weight");
    }
  });
}

TEST(ErrorsInUse, DataPutInAHandlesPlace) {
  for (const bool alone : {true, false}) {
    expect_error(
        2,
        [&] {
          nn::Sequential model(nn::Linear(nn::LinearOptions(4, 4).bias(!alone)));
          fully_shard(*model[0]);
          auto weight = model[0]->as<nn::Linear>()->weight;
          const auto view = alone ? at::Tensor() : weight.t(); // keeps the handle's memory
          {
            const engine::InternalScope unseen; // as by whoever does not ask the tensor
            weight.set_data(torch::ones({4, 4}));
          }
          weight.sum().backward();
        },
        {"the data of 'weight' were replaced", "copy new values into it"});
  }
}

TEST(ErrorsInUse, AMistakeInALaterParameterLeavesTheModuleAsItWas) {
  on_threads(2, [] {
    nn::Linear model(4, 4);
    const auto before = model->weight.detach().clone();
    const auto placement = [](const at::Tensor&, const std::string&) {
      return ShardPlacement{.dim = 1};
    }; // not the bias
    EXPECT_THROW(fully_shard(*model, {.shard_placement_fn = placement}), Error);
    EXPECT_TRUE(torch::equal(model->weight, before));
    EXPECT_FALSE(is_sharded(model->parameters()[0]));
  });
}

TEST(ErrorsInUse, SummonInABackward) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model);
        auto loss = model->forward(torch::ones({2, 4})).sum();
        loss.register_hook([&](const at::Tensor&) { auto guard = summon_full_params(*model); });
        loss.backward();
      },
      {"[summon_full_params] was called in a backward, which computes with the parameters of '(root)'"});
}

TEST(ErrorsInUse, SummonWritesBackFromNobody) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model);
        auto guard = summon_full_params(*model, {.rank0_only = true});
      },
      {"set writeback = false"});
}

TEST(ErrorsInUse, RootOnlySettersBelowTheRoot) {
  expect_error(
      2,
      [] {
        nn::Sequential model(nn::Linear(4, 4));
        auto below = fully_shard(*model[0]);
        fully_shard(*model);
        below.reset_iter_state();
      },
      {"[reset_iter_state] is for the root"});
}

TEST(ErrorsInUse, AnEventOfTheOptimizerBelowTheRoot) {
  expect_error(
      2,
      [] {
        nn::Sequential model(nn::Linear(4, 4));
        auto below = fully_shard(*model[0]);
        fully_shard(*model);
        below.set_post_optim_event(nullptr);
      },
      {"[set_post_optim_event] is for the root", "'0' lies below '(root)'"});
}

TEST(ErrorsInUse, SharingBelowTheRoot) {
  expect_error(
      2,
      [] {
        nn::Sequential model(nn::Linear(4, 4));
        nn::Linear other(4, 4);
        auto below = fully_shard(*model[0]);
        fully_shard(*model);
        share_comm_ctx({fully_shard(*other), below});
      },
      {"[share_comm_ctx] is for the root", "'0' lies below '(root)'"});
}

// The parameter ends with its last reader; its shard stays registered.
TEST(ErrorsInUse, WeightsTiedAfterSharding) {
  expect_error(
      2,
      [] {
        nn::Linear first(4, 4), head(nn::LinearOptions(4, 4).bias(false));
        nn::Sequential model(first, head);
        fully_shard(*head);
        head->weight = first->weight;
        fully_shard(*model);
      },
      {"[fully_shard] '1.weight' is this rank's piece of a parameter that is gone", "tie weights before"});
}

TEST(ErrorsInUse, AStreamForTheHookOfAHybridMesh) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        auto unit = fully_shard(*model, {.mesh = init_device_mesh("cpu", {1, 2}, {"replicate", "shard"})});
        unit.set_all_reduce_hook([](at::Tensor&) {}, c10::Stream(c10::Stream::DEFAULT, c10::kCPU));
      },
      {"[set_all_reduce_hook] a stream cannot be given on a hybrid mesh", "leave it out"});
}

TEST(ErrorsInUse, CollectivesThatAreNone) {
  expect_error(
      1,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model).set_custom_all_gather(nullptr);
      },
      {"[set_custom_all_gather] the function is empty"});
  expect_error(
      1,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model).set_custom_reduce_scatter(nullptr);
      },
      {"[set_custom_reduce_scatter] the function is empty"});
}

TEST(ErrorsInUse, OtherGathersOfWhatIsShownWhole) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        auto unit = fully_shard(*model);
        const auto whole = summon_full_params(*model);
        unit.set_custom_all_gather([](at::Tensor&, const at::Tensor&, Group&) {});
      },
      {"[set_custom_all_gather] the parameters of '(root)' are shown whole by summon_full_params", "after that guard"});
}

TEST(ErrorsInUse, ACloneOfAPlainModule) {
  expect_error(
      1,
      [] {
        nn::Sequential model(nn::Linear(4, 4));
        fsdp::clone(*model);
      },
      {"[clone] the module is not sharded", "use module->clone()"});
}

TEST(ErrorsInUse, AnAverageOfAnotherModel) {
  const auto update = [](nn::Sequential average) {
    nn::Sequential model(nn::Linear(4, 4));
    fully_shard(*model);
    fully_shard(*average);
    ema_update_(*average, *model, 0.5);
  };
  expect_error(
      2,
      [&] { update(nn::Sequential(nn::Linear(4, 4), nn::Linear(4, 4))); },
      {"[ema_update_] the average has 4 parameters and the model 2", "fsdp::clone(model)"});
  expect_error(
      2,
      [&] { update(nn::Sequential(nn::Linear(8, 4))); },
      {"[ema_update_] shard 0 has sizes [2, 8] in the average and [2, 4] in the model", "fsdp::clone(model)"});
}

TEST(ErrorsInUse, ArgumentsOfSetters) {
  expect_error(
      1,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model).set_reduce_scatter_max_input_buffers(0);
      },
      {"at least 1 buffer"});
  expect_error(
      1,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model).set_gradient_divide_factor(0);
      },
      {"cannot be divided by 0"});
  expect_error(
      1,
      [] {
        nn::Linear model(4, 4);
        auto unit = fully_shard(*model);
        unit.set_custom_all_gather([](at::Tensor&, const at::Tensor&, Group&) {});
        unit.set_allocate_memory_from_process_group_for_comm(true);
      },
      {"use one or the other"});
}

TEST(ErrorsInUse, RowsThatRanksRenormalizeByThemselves) {
  expect_error(
      2,
      [] {
        nn::Embedding model(nn::EmbeddingOptions(6, 4).max_norm(1));
        fully_shard(*model);
        model->forward(torch::tensor({rank()}));
      },
      {"max_norm renormalizes the rows of 'weight'", "renormalize the shards"});
}

TEST(ErrorsInUse, ShardsReplacedByWholeTensors) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model);
        model->parameters()[0].set_data(torch::ones({4, 4}));
        model->forward(torch::ones({2, 4}));
      },
      {"the shard of 'weight' was replaced", "this rank's piece"});
}

void give_data_and_train(bool to_empty_parts) {
  nn::Linear model(nn::LinearOptions(1, 1).bias(false));
  {
    const torch::NoGradGuard no_grad;
    model->weight.fill_(1);
  }
  fully_shard(*model);
  at::Tensor part = model->parameters()[0];
  EXPECT_EQ(part.numel(), rank() == 0 ? 1 : 0);
  if (to_empty_parts || part.numel() > 0) {
    part.set_data(part.detach() * 2);
  }
  const auto loss = model->forward(torch::full({1, 1}, 3.0)).sum();
  loss.backward();
  EXPECT_EQ(loss.item<float>(), 6);
}

TEST(ErrorsInUse, DataGivenToParametersOnSomeRanks) {
  expect_error(
      2,
      [] { give_data_and_train(/*to_empty_parts=*/false); },
      {"data given to parameters of", "all ranks must call the same"});
  on_threads(3, [] { give_data_and_train(/*to_empty_parts=*/true); });
}

} // namespace
} // namespace fsdp::testing
