// Every mistake has a message that says what to do.

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/script.h>

#include "engine/internal_scope.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/counting_group.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

/// Empty if there is no error.
std::string message_of(const std::function<void()>& mistake) {
  try {
    mistake();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// Runs `mistake` on every rank; expects an error whose message has all the parts.
void expect_error(int ranks, const std::function<void()>& mistake, const std::vector<std::string>& parts) {
  on_threads(ranks, [&] {
    const std::string message = message_of(mistake);
    ASSERT_FALSE(message.empty()) << "no error";
    for (const auto& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
    }
  });
}

TEST(Errors, FullyShardTwice) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model);
        fully_shard(*model);
      },
      {"[fully_shard] was called twice", "children before parents"});
}

TEST(Errors, AChildAfterItsParent) {
  expect_error(
      2,
      [] {
        nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
        fully_shard(model);
        fully_shard(model[1]);
      },
      {"[fully_shard] nothing is left to shard in the module 'torch::nn::LinearImpl'",
       "its 'weight' into the unit '(root)' (where it is '1.weight')",
       "children first, then on their parents"});
  expect_error(
      2,
      [] {
        nn::Linear fc(4, 4);
        const auto frozen = fc->register_parameter("frozen", torch::ones({3}));
        nn::Sequential block(fc);
        nn::ModuleList model(block);
        fully_shard(block, {.ignored_params = {frozen}});
        fully_shard(model, {.ignored_params = {frozen}});
        fully_shard(fc, {.ignored_params = {frozen}});
      },
      {"nothing is left to shard", "into the unit '0' (where it is '0.0.weight')"});
  expect_error(
      2,
      [] {
        nn::ParameterList list;
        list->append(torch::ones({4}));
        nn::ModuleList model(list);
        fully_shard(model);
        fully_shard(list);
      },
      {"nothing is left to shard in the module 'torch::nn::ParameterListImpl'"});
}

// Their parameters have units, but none that a call on a module above has made.
TEST(Errors, NotWhereAllParametersAreThoseOfOtherUnits) {
  on_threads(2, [] {
    nn::Linear inner(4, 4);
    nn::Sequential middle(inner);
    nn::ModuleList model(middle);
    fully_shard(inner);
    fully_shard(model); // has none of its own
    EXPECT_TRUE(as_fsdp(model).unit()->params().empty());
    fully_shard(middle);
    struct TiedImpl : nn::Module {
      explicit TiedImpl(const at::Tensor& weight) {
        register_parameter("weight", weight);
      }
    };
    nn::Linear first(4, 4);
    const auto last = std::make_shared<TiedImpl>(first->weight);
    fully_shard(first);
    EXPECT_TRUE(fully_shard(last).unit()->params().empty());
  });
}

TEST(Errors, NoParameters) {
  expect_error(
      1,
      [] {
        nn::ReLU model;
        fully_shard(*model);
      },
      {"no parameters", "nothing to shard"});
}

TEST(Errors, MeshOfThreeDimensions) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model, {.mesh = init_device_mesh("cpu", {1, 1, 2}, {"a", "b", "c"})});
      },
      {"one dimension (shard) or two", "slice it"});
}

TEST(Errors, HybridMeshWithoutNames) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model, {.mesh = init_device_mesh("cpu", {1, 2})});
      },
      {"hybrid mesh need names"});
}

TEST(Errors, ReshardToARankCountThatDoesNotDivide) {
  expect_error(
      4,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model, {.reshard_after_forward = 3});
      },
      {"reshard_after_forward = 3", "must divide the 4 ranks"});
}

TEST(Errors, ShardDimensionThatIsNotThere) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        fully_shard(
            *model, {.shard_placement_fn = [](const at::Tensor&, const std::string&) { return ShardPlacement{1}; }});
      },
      {"dimension 1 for 'bias'", "1 dimensions"});
}

TEST(Errors, ParametersThatAreNotDense) {
  for (const auto& weight : {torch::eye(4).to_sparse(), torch::eye(4).to_sparse_csr()}) {
    expect_error(
        2,
        [&] {
          nn::Sequential model(nn::Linear(4, 4));
          model->register_parameter("weight", weight.clone());
          fully_shard(*model);
        },
        {"'weight' is a Sparse", "to_dense()", "ignored_params"});
  }
}

TEST(Errors, AParameterInTwoMeshes) {
  expect_error(
      4,
      [] {
        nn::Sequential model(nn::Linear(4, 4));
        auto mesh = init_device_mesh("cpu", {2, 2}, {"a", "b"});
        auto handle = model[0]->as<nn::Linear>()->weight;
        fully_shard(*model[0], {.mesh = mesh["a"]});
        struct TiedImpl : nn::Module {};
        auto tied = std::make_shared<TiedImpl>();
        tied->register_parameter("weight", handle);
        tied->register_parameter("own", torch::randn({4}));
        fully_shard(*tied, {.shard_placement_fn = [&](const at::Tensor&, const std::string&) {
          return ShardPlacement{0, mesh["b"]};
        }});
      },
      {"cannot be in two meshes"});
}

TEST(Errors, DifferentModelsOnDifferentRanks) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, rank() == 0 ? 4 : 5);
        fully_shard(*model);
      },
      {"shard differently", "Build the same model on every rank"});
}

// Their elements would be taken for one another's, where one rank has read its weights from a file, say.
TEST(Errors, ModelsThatLieOtherwiseInMemory) {
  for (const bool replicated : {false, true}) {
    expect_error(
        2,
        [replicated] {
          nn::Conv2d model(2, 4, 3);
          if (rank() == 0) {
            model->weight.set_data(model->weight.contiguous(at::MemoryFormat::ChannelsLast));
          }
          FullyShardOptions options{.sync_module_states = true};
          if (replicated) {
            options.mesh = init_device_mesh("cpu", {2, 1}, {"replicate", "shard"});
          }
          fully_shard(*model, options);
        },
        {"shard differently", "in memory 18 1 6 2"});
  }
}

// A model of thousands of parameters on thousands of ranks is compared by what fits into a packet.
TEST(Errors, ModelsThatAreTheSameAreNotSent) {
  thread_group(3, [] {
    const auto counting = std::make_shared<CountingGroup>(world());
    const auto exchanged_by = [&](size_t linears) {
      nn::Sequential model;
      for (size_t i = 0; i < linears; ++i) {
        model->push_back(nn::Linear(2, 2));
      }
      torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) {
        parameter.fill_(1);
      }
      counting->exchanged.clear();
      fully_shard(*model, {.mesh = Mesh::from_group(counting, "shard")});
      return counting->exchanged;
    };
    const auto messages = exchanged_by(1);
    EXPECT_EQ(messages.size(), 1U);
    EXPECT_LE(messages[0], 96U);
    EXPECT_EQ(exchanged_by(20), messages);
  });
}

TEST(Errors, AnUnsupportedDevice) {
  expect_error(1, [] { init_device_mesh("quantum", {1}); }, {"quantum"});
}

void shard_on(c10::Device device) {
  nn::Linear model(4, 4);
  fully_shard(*model, {.mesh = Mesh::from_groups({group_of_one()}, {"shard"}, device)});
}

TEST(Errors, AMeshOnADeviceThatThisLibTorchDoesNotKnow) {
  for (const auto type : {c10::kPrivateUse1, c10::kXLA, c10::kMeta}) {
    expect_error(1, [=] { shard_on(c10::Device(type, 0)); }, {"[fully_shard] the mesh is on '", "has no support for"});
  }
}

// In a process of its own, where alone that device is known.
TEST(Errors, AMeshOnADeviceFromOutside) {
  on_processes(1, [] {
    constexpr auto kOutside = c10::kPrivateUse1;
    const c10::impl::DeviceGuardImplRegistrar known(kOutside, new c10::impl::NoOpDeviceGuardImpl<kOutside>());
    expect_error(1, [] { shard_on(c10::Device(kOutside, 0)); }, {"joins LibTorch from outside", "set_data"});
  });
}

TEST(Errors, NoModules) {
  expect_error(
      1, [] { fully_shard(std::vector<nn::Module*>{}); }, {"the list of modules is empty", "at least one module"});
}

TEST(Errors, ANullModule) {
  expect_error(
      1,
      [] {
        nn::Linear model(4, 4);
        fully_shard(std::vector<nn::Module*>{model.get(), nullptr});
      },
      {"[fully_shard] one of the modules is null"});
}

TEST(Errors, ATorchScriptModuleTwice) {
  expect_error(
      2,
      [] {
        torch::jit::Module module("Net");
        module.register_parameter("weight", torch::ones({3, 5}).requires_grad_(), /*is_buffer=*/false);
        fully_shard(module);
        fully_shard(module);
      },
      {"[fully_shard] was called twice on the same TorchScript module", "call it once"});
}

TEST(Errors, AsFsdpOfAPlainModule) {
  expect_error(
      1,
      [] {
        nn::Linear model(4, 4);
        as_fsdp(*model);
      },
      {"[as_fsdp] fully_shard was not called on this module"});
}

TEST(Errors, ShardedOfAPlainTensor) {
  expect_error(1, [] { sharded(torch::ones({2})); }, {"[sharded] a parameter's shard is needed"});
}

TEST(Errors, AnOptimizerBuiltBeforeFullyShard) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        torch::optim::SGD optimizer(model->parameters(), 0.1);
        fully_shard(*model);
        model->forward(torch::ones({2, 4})).sum().backward();
        optimizer.step();
      },
      {"after fully_shard", "the model's parameters()"});
}

TEST(Errors, AWriteToAHandleInTheMiddleOfAStep) {
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

TEST(Errors, RawAccessToAHollowHandle) {
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

TEST(Errors, RawAccessIsRefusedByThePresentNameAfterEachUse) {
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

TEST(Errors, DataPutInAHandlesPlace) {
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

TEST(Errors, AMistakeInALaterParameterLeavesTheModuleAsItWas) {
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

TEST(Errors, SummonInABackward) {
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

TEST(Errors, SummonWritesBackFromNobody) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        fully_shard(*model);
        auto guard = summon_full_params(*model, {.rank0_only = true});
      },
      {"set writeback = false"});
}

TEST(Errors, RootOnlySettersBelowTheRoot) {
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

TEST(Errors, AnEventOfTheOptimizerBelowTheRoot) {
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

TEST(Errors, SharingBelowTheRoot) {
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
TEST(Errors, WeightsTiedAfterSharding) {
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

TEST(Errors, AStreamForTheHookOfAHybridMesh) {
  expect_error(
      2,
      [] {
        nn::Linear model(4, 4);
        auto unit = fully_shard(*model, {.mesh = init_device_mesh("cpu", {1, 2}, {"replicate", "shard"})});
        unit.set_all_reduce_hook([](at::Tensor&) {}, c10::Stream(c10::Stream::DEFAULT, c10::kCPU));
      },
      {"[set_all_reduce_hook] a stream cannot be given on a hybrid mesh", "leave it out"});
}

TEST(Errors, CollectivesThatAreNone) {
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

TEST(Errors, OtherGathersOfWhatIsShownWhole) {
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

TEST(Errors, ACloneOfAPlainModule) {
  expect_error(
      1,
      [] {
        nn::Sequential model(nn::Linear(4, 4));
        fsdp::clone(*model);
      },
      {"[clone] the module is not sharded", "use module->clone()"});
}

TEST(Errors, AnAverageOfAnotherModel) {
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

TEST(Errors, ArgumentsOfSetters) {
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

TEST(Errors, RowsThatRanksRenormalizeByThemselves) {
  expect_error(
      2,
      [] {
        nn::Embedding model(nn::EmbeddingOptions(6, 4).max_norm(1));
        fully_shard(*model);
        model->forward(torch::tensor({rank()}));
      },
      {"max_norm renormalizes the rows of 'weight'", "renormalize the shards"});
}

TEST(Errors, ShardsReplacedByWholeTensors) {
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

TEST(Errors, DataGivenToParametersOnSomeRanks) {
  expect_error(
      2,
      [] { give_data_and_train(/*to_empty_parts=*/false); },
      {"data given to parameters of", "all ranks must call the same"});
  on_threads(3, [] { give_data_and_train(/*to_empty_parts=*/true); });
}

} // namespace
} // namespace fsdp::testing
