// Every mistake in sharding has a message that says what to do.

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/script.h>

#include "nn/expect_error.h"
#include "nn/subjects.h"
#include "support/counting_group.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

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

} // namespace
} // namespace fsdp::testing
