#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "base/stream.h"
#include "comm/c10d/order_check.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "streams/devices.h"
#include "streams/queued_device.h"
#include "support/error_message.h"

/// Training on a device whose memory and streams are watched: every use of memory is ordered after the uses before it,
/// and the numbers are those of unsharded training on the same device.
namespace fsdp::testing {
namespace {

using Races = std::vector<std::string>;

void expect_parity_without_races(const Trial& trial, const Arrangement& arrangement = {2}) {
  device_of_inputs = queued_device::device(0);
  const auto reference = train_unsharded(trial, arrangement);
  queued_device::detector().begin_test();
  on_devices(arrangement, [&](const Mesh& mesh) {
    Trial mine = trial;
    mine.options.mesh = mesh;
    train_sharded(mine, reference);
  });
  EXPECT_EQ(queued_device::detector().take_races(), Races());
}

Trial tied() {
  return {.make = [] { return subjects::tied(); }};
}

TEST(OnStreams, TheOrderCheckDoesNotWaitForTheDevice) {
  const c10::Device device = queued_device::device(0);
  const adapter::OrderRecord here{0, "all-reduce", {"test", "here"}, 32}, there{0, "all-reduce", {"test", "there"}, 32};
  const at::Tensor all = at::cat({here.to_tensor(at::kCPU), there.to_tensor(at::kCPU)}).to(device);
  const int64_t waits = queued_device::detector().waits_of_host();
  adapter::OrderRecords records;
  records.add(all, here.to_tensor(device));
  EXPECT_EQ(records.find_mismatch(0, 2), "");
  EXPECT_EQ(queued_device::detector().waits_of_host(), waits);
  synchronize(current_stream(device));
  EXPECT_TRUE(contains(records.find_mismatch(0, 2), "'there'"));
}

TEST(OnStreams, ModelsTrain) {
  expect_parity_without_races({.make = [] { return subjects::mlp(); }});
  expect_parity_without_races(tied());
  expect_parity_without_races({.make = [] { return subjects::tied(/*checkpointed=*/true); }});
}

TEST(OnStreams, ReshardPolicies) {
  for (const auto reshard : {ReshardAfterForward(false), ReshardAfterForward(true)}) {
    Trial trial = tied();
    trial.options.reshard_after_forward = reshard;
    expect_parity_without_races(trial);
  }
}

TEST(OnStreams, ReshardingToFewerRanks) {
  for (const int ranks : {1, 2, 4}) {
    Trial trial = tied();
    trial.options.reshard_after_forward = ranks;
    expect_parity_without_races(trial, {4});
  }
}

TEST(OnStreams, ModelsWithBuffers) {
  expect_parity_without_races({.make = [] {
    torch::nn::Sequential model(torch::nn::Linear(7, 6), torch::nn::BatchNorm1d(6), torch::nn::Linear(6, 3));
    return subjects::subject_of(
        model.ptr(),
        [model](int rank, int step) mutable {
          return model->forward(subjects::data(rank, step, {4, 7})).pow(2).mean();
        },
        {model[0], model[1]});
  }});
}

TEST(OnStreams, MixedPrecision) {
  Trial trial = tied();
  trial.options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  expect_parity_without_races(trial);
}

TEST(OnStreams, HybridMeshes) {
  for (const int in_flight : {1, 3}) {
    Trial trial = tied();
    trial.prepare = [=](Subject&, FSDPModule& root) { root.set_reduce_scatter_max_input_buffers(in_flight); };
    expect_parity_without_races(trial, {.shards = 2, .replicas = 2});
    expect_parity_without_races(trial, {.shards = 1, .replicas = 3});
  }
}

TEST(OnStreams, Accumulation) {
  for (const auto accumulate : {Accumulate::kNoSync, Accumulate::kNoAllReduce}) {
    Trial trial = tied();
    trial.accumulate = accumulate;
    expect_parity_without_races(trial, {.shards = 2, .replicas = 2});
  }
}

TEST(OnStreams, ShardsAlongInnerDimensions) {
  Trial trial = tied();
  trial.options.shard_placement_fn = [](const at::Tensor& param, const std::string&) {
    return ShardPlacement{.dim = std::max<int64_t>(param.dim() - 1, 0)};
  };
  expect_parity_without_races(trial);
}

TEST(OnStreams, APlacementOnAnotherDeviceIsAnError) {
  on_devices({1}, [&](const Mesh& mesh) {
    const Mesh elsewhere = Mesh::from_groups({group_of_one()}, {"shard"}, c10::kCPU);
    const auto placement = [&](const at::Tensor&, const std::string&) { return ShardPlacement{.mesh = elsewhere}; };
    torch::nn::Linear model(4, 4);
    const auto said = error_message([&] { fully_shard(*model, {.mesh = mesh, .shard_placement_fn = placement}); });
    EXPECT_TRUE(contains(said, "[fully_shard] 'weight' is to lie on " + elsewhere.str()));
    EXPECT_TRUE(contains(said, "for one kind of device"));
  });
}

TEST(OnStreams, SettersThatMoveWork) {
  Trial trial = tied();
  trial.prepare = [](Subject& subject, FSDPModule& root) {
    root.set_reduce_scatter_max_input_buffers(1);
    auto first = as_fsdp(*subject.parts[0]), second = as_fsdp(*subject.parts[1]);
    first.set_modules_to_forward_prefetch({second});
    second.set_modules_to_backward_prefetch({first});
    second.set_reshard_after_backward(false);
  };
  expect_parity_without_races(trial);
}

TEST(OnStreams, HooksOnStreamsOfTheirOwn) {
  Trial trial = tied();
  trial.prepare = [](Subject&, FSDPModule& root) {
    const auto device = queued_device::device(rank());
    const auto pool = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
    root.set_all_reduce_hook(
        [=](at::Tensor& gradient) {
          EXPECT_EQ(current_stream(device), pool);
          gradient.mul_(1);
        },
        pool);
  };
  expect_parity_without_races(trial);
}

TEST(OnStreams, Clipping) {
  Trial trial = tied();
  trial.before_step = [](Subject& subject, FSDPModule&, int) { clip_grad_norm_(*subject.module, 1e9); };
  expect_parity_without_races(trial, {.shards = 2, .replicas = 2});
}

TEST(OnStreams, ParametersReadAndWrittenBetweenSteps) {
  Trial trial = tied();
  trial.before_step = [](Subject& subject, FSDPModule&, int) {
    auto guard = summon_full_params(*subject.module, {.with_grads = true});
    c10::NoGradGuard no_grad;
    for (auto& parameter : subject.module->parameters()) {
      parameter.mul_(1);
    }
    guard.end();
  };
  expect_parity_without_races(trial);
}

/// Of copies on the host nothing stays on the device, and members are there, too.
TEST(OnStreams, ParametersReadAndWrittenOnTheHost) {
  Trial trial = tied();
  trial.options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  trial.before_step = [](Subject& subject, FSDPModule&, int) {
    const auto embedding = subject.module->as<subjects::Tied>()->embedding->weight;
    {
      auto guard = summon_full_params(*subject.module, {.offload_to_cpu = true});
      c10::NoGradGuard no_grad;
      for (auto& parameter : subject.module->parameters()) {
        EXPECT_TRUE(parameter.is_cpu());
        parameter.mul_(2);
      }
      EXPECT_TRUE(embedding.is_cpu());
      EXPECT_EQ(embedding.scalar_type(), torch::kFloat);
      const auto before = subject.module->named_parameters()["embedding.weight"].clone();
      embedding.div_(2);
      EXPECT_TRUE(torch::equal(subject.module->named_parameters()["embedding.weight"], before / 2));
      for (auto& item : subject.module->named_parameters()) {
        if (item.key() != "embedding.weight") {
          item.value().div_(2);
        }
      }
      guard.end();
    }
    EXPECT_FALSE(embedding.is_cpu());
  };
  expect_parity_without_races(trial);
}

struct DeepImpl : torch::nn::Cloneable<DeepImpl> {
  DeepImpl() {
    DeepImpl::reset();
  }
  void reset() override {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
  }
  static constexpr int64_t kLayers = 8, kWidth = 32;
  std::vector<torch::nn::Linear> layers;
};

/// The most bytes that `act` takes on the calling rank's device beyond what there was, in wholes of a unit.
double units_at_once(const Mesh& mesh, const std::function<void(std::shared_ptr<DeepImpl>)>& act) {
  auto model = std::make_shared<DeepImpl>();
  for (auto& layer : model->layers) {
    fully_shard(*layer, {.mesh = mesh, .mp_policy = {.param_dtype = torch::kBFloat16}});
  }
  fully_shard(*model, {.mesh = mesh});
  queued_device::detector().most_bytes_since_last_call(rank());
  act(model);
  const int64_t unit_bytes = (DeepImpl::kWidth + 1) * DeepImpl::kWidth * 4;
  return static_cast<double>(queued_device::detector().most_bytes_since_last_call(rank())) / unit_bytes;
}

TEST(OnStreams, ShowingParametersOnTheHostTakesOneUnitOfTheDevice) {
  on_devices({2}, [](const Mesh& mesh) {
    const double units = units_at_once(mesh, [](const auto& model) {
      const auto guard = summon_full_params(*model, {.offload_to_cpu = true});
      EXPECT_TRUE(model->parameters()[0].is_cpu());
    });
    EXPECT_LE(units, 3.0);
  });
}

TEST(OnStreams, RanksThatShowNothingTakeOneUnitOfTheDevice) {
  on_devices({2}, [](const Mesh& mesh) {
    const double units = units_at_once(mesh, [](const auto& model) {
      const auto guard = summon_full_params(*model, {.writeback = false, .rank0_only = true});
    });
    EXPECT_EQ(units > 3.0, rank() == 0) << units;
  });
}

TEST(OnStreams, CopiesOfAModelTakeOneUnitOfTheDeviceAndTheirShards) {
  on_devices({2}, [](const Mesh& mesh) {
    const double units = units_at_once(mesh, [](const auto& model) { const auto copy = fsdp::clone(model); });
    EXPECT_LE(units, DeepImpl::kLayers / 2.0 + 3.0);
  });
}

TEST(OnStreams, RecordingAStreamIsNoWrite) {
  on_devices({2}, [](const Mesh& mesh) {
    torch::nn::Linear model(4, 4);
    auto unit = fully_shard(*model, {.mesh = mesh});
    const auto loss = model->forward(torch::ones({2, 4}, torch::TensorOptions().device(mesh.device()))).sum();
    model->weight.record_stream(new_stream(mesh.device()));
    model->parameters()[0].record_stream(new_stream(mesh.device()));
    EXPECT_FALSE(unit.unit()->is_private());
    loss.backward();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

TEST(OnStreams, AnEventOfTheOptimizer) {
  Trial trial = tied();
  trial.before_step = [](Subject&, FSDPModule& root, int) {
    auto event = std::make_shared<c10::Event>(c10::kHPU);
    event->record(current_stream(queued_device::device(rank())));
    root.set_post_optim_event(event);
  };
  expect_parity_without_races(trial);
}

TEST(OnStreams, ShardsReplacedBetweenSteps) {
  Trial trial = tied();
  trial.before_step = [](Subject& subject, FSDPModule&, int) {
    torch::NoGradGuard no_grad;
    for (auto& shard : subject.module->parameters()) {
      shard.set_data(shard.detach().clone());
    }
  };
  expect_parity_without_races(trial);
}

TEST(OnStreams, OneRankAlone) {
  Trial trial = tied();
  expect_parity_without_races(trial, {1});
  trial.options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  expect_parity_without_races(trial, {1});
  trial.options.offload_policy = CPUOffloadPolicy{};
  expect_parity_without_races(trial, {1});
}

TEST(OnStreams, SeveralRootsThatShareTheirStreams) {
  queued_device::detector().begin_test();
  on_devices({2}, [&](const Mesh& mesh) {
    torch::nn::Linear first(7, 5), second(5, 3);
    share_comm_ctx({fully_shard(*first, {.mesh = mesh}), fully_shard(*second, {.mesh = mesh})});
    torch::optim::SGD optimizer(first->parameters(), 0.1);
    optimizer.add_param_group(second->parameters());
    for (int step = 0; step < 3; ++step) {
      second(torch::relu(first(subjects::data(rank(), step, {4, 7})))).sum().backward();
      optimizer.step();
    }
  });
  EXPECT_EQ(queued_device::detector().take_races(), Races());
}

/// The optimizer works on the host: a copy to the device has to be over before it writes what is copied.
TEST(OnStreams, Offload) {
  for (const bool pinned : {true, false}) {
    Trial trial = tied();
    trial.options.offload_policy = CPUOffloadPolicy{.pin_memory = pinned};
    trial.before_step = [pinned](Subject& subject, FSDPModule&, int step) {
      for (const auto& shard : subject.module->parameters()) {
        ASSERT_TRUE(shard.is_cpu());
        EXPECT_EQ(shard.is_pinned(), pinned);
        if (step > 0) {
          queued_device::detector().written_by_host(shard.data_ptr(), rank(), "optimizer");
        }
      }
    };
    expect_parity_without_races(trial);
  }
}

TEST(OnStreams, OffloadWithTheOtherOptions) {
  for (const auto& reshard : {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(1)}) {
    for (const auto accumulate : {Accumulate::kNone, Accumulate::kNoSync, Accumulate::kNoAllReduce}) {
      for (int bits = 0; bits < 16; ++bits) {
        const bool checkpointed = (bits & 1) != 0, bf16 = (bits & 2) != 0, hybrid = (bits & 4) != 0;
        const bool frozen = (bits & 8) != 0;
        SCOPED_TRACE(
            ::testing::Message() << reshard.ranks().value_or(0) << " " << static_cast<int>(accumulate) << " " << bits);
        const auto make = [=] {
          auto subject = subjects::tied(checkpointed);
          for (auto& parameter : subject.parts[1]->parameters()) {
            parameter.set_requires_grad(!frozen);
          }
          return subject;
        };
        Trial trial{.make = make, .accumulate = accumulate, .steps = 2};
        trial.options = {.reshard_after_forward = reshard, .offload_policy = CPUOffloadPolicy{}};
        if (bf16) {
          trial.options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
        }
        expect_parity_without_races(trial, hybrid ? Arrangement{.shards = 2, .replicas = 2} : Arrangement{2});
      }
    }
  }
}

TEST(OnStreams, StepsOfOtherKinds) {
  queued_device::detector().begin_test();
  on_devices({2}, [](const Mesh& mesh) {
    Subject subject = make_seeded(tied());
    barrier();
    for (auto& part : subject.parts) {
      fully_shard(*part, {.mesh = mesh});
    }
    auto root = fully_shard(*subject.module, {.mesh = mesh});
    torch::optim::SGD optimizer(parameters(*subject.module), 0.1);
    const auto block = [&](int i, const at::Tensor& x) { return subject.parts[i]->as<subjects::Block>()->forward(x); };
    const auto x = torch::ones({2, 6}, torch::TensorOptions().device(mesh.device()));
    for (int step = 0; step < 4; ++step) {
      as_fsdp(*subject.parts[2]).unshard(/*async_op=*/true); // nobody waits for it
      (subject.loss(rank(), step) + subject.loss(rank(), step + 1) + block(step % 2, x).sum()).backward();
      as_fsdp(*subject.parts[2]).reshard();
      optimizer.step();
      optimizer.zero_grad();
      const auto hidden = block(0, x);
      hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("broken off"); });
      EXPECT_ANY_THROW(block(1, hidden).sum().backward());
      root.reset_iter_state();
    }
  });
  EXPECT_EQ(queued_device::detector().take_races(), Races());
}

TEST(OnStreams, ACallMovesItsInputs) {
  on_devices({2}, [](const Mesh& mesh) {
    torch::nn::Linear model(4, 3);
    fully_shard(*model, {.mesh = mesh});
    EXPECT_EQ(call(model, torch::ones({2, 4})).device(), mesh.device());
  });
}

void bring_own_collectives(FSDPModule unit) {
  unit.set_custom_all_gather([](at::Tensor& output, const at::Tensor& input, Group& group) {
    output.zero_();
    output.view({group.size(), -1})[group.rank()].copy_(input);
    group.all_reduce(output, ReduceOp::kSum, 1, {"custom", ""})->wait();
  });
  unit.set_custom_reduce_scatter([](at::Tensor& output, const at::Tensor& input, Group& group) {
    const at::Tensor sums = input.clone();
    group.all_reduce(sums, ReduceOp::kSum, 1, {"custom", ""})->wait();
    output.copy_(sums.view({group.size(), -1})[group.rank()]);
  });
}

TEST(OnStreams, CustomCollectives) {
  Trial trial = tied();
  trial.prepare = [](Subject& subject, FSDPModule& root) {
    bring_own_collectives(root);
    for (auto& part : subject.parts) {
      bring_own_collectives(as_fsdp(*part));
    }
  };
  expect_parity_without_races(trial);
}

const Label kTest{"test", "unit"};

/// A write of shards comes after a gather that is still on its way, though nobody has waited for it.
TEST(OnStreams, WritesComeAfterAGatherThatNobodyWaitedFor) {
  queued_device::detector().begin_test();
  for (const bool offload : {false, true}) {
    on_devices({2}, [&](const Mesh& mesh) {
      const auto home = mesh.group()->make_home(
          {Piece{8, 4, at::kFloat, at::kFloat}}, {mesh.device(), offload, /*pin_memory=*/offload}, kTest);
      const Stream other = new_stream(mesh.device());
      wait_stream(other, current_stream(mesh.device()));
      std::unique_ptr<Gathered> gathered;
      {
        const StreamGuard guard(other);
        gathered = home->gather(kTest);
      }
      home->begin_write(kTest);
      if (offload) {
        queued_device::detector().written_by_host(home->slice(0), rank(), "write");
      } else {
        torch::from_blob(home->slice(0), {4}, torch::TensorOptions().device(mesh.device())).zero_();
      }
    });
    EXPECT_EQ(queued_device::detector().take_races(), Races());
  }
}

TEST(OnStreams, AGatherGivenBackOnADeviceThatHasFailedDoesNotEndTheProcess) {
  on_devices({2}, [&](const Mesh& mesh) {
    const std::vector<Piece> of_two{{8, 4, at::kFloat, at::kFloat}}, of_one{{8, 8, at::kFloat, at::kFloat}};
    const auto home = mesh.group()->make_home(of_two, {mesh.device()}, kTest);
    const auto home_alone = group_of_one()->make_home(of_one, {mesh.device()}, kTest);
    auto gathered = home->gather(kTest), gathered_alone = home_alone->gather(kTest);
    gathered->wait();
    gathered_alone->wait();
    barrier();
    const StreamGuard other(new_stream(mesh.device()));
    queued_device::fail_events(true);
    gathered.reset();
    gathered_alone.reset();
    barrier();
    queued_device::fail_events(false);
    barrier();
  });
}

class TheHostDoesNotWait : public ::testing::TestWithParam<Arrangement> {};
INSTANTIATE_TEST_SUITE_P(
    OnStreams, TheHostDoesNotWait, ::testing::Values(Arrangement{2}, Arrangement{2, 2}, Arrangement{1, 2}));

/// Otherwise it could not run ahead of the device.
TEST_P(TheHostDoesNotWait, InAStep) {
  auto& detector = queued_device::detector();
  on_devices(GetParam(), [&](const Mesh& mesh) {
    Subject subject = make_seeded(tied());
    for (auto& part : subject.parts) {
      fully_shard(*part, {.mesh = mesh});
    }
    fully_shard(*subject.module, {.mesh = mesh});
    const auto other = torch::zeros({2, 5}, torch::TensorOptions().dtype(torch::kLong).device(mesh.device()));
    for (int step = 0; step < 3; ++step) {
      const auto loss = subject.loss(rank(), step);
      barrier();
      const int64_t before = detector.waits_of_host();
      barrier();
      loss.backward();
      const auto next = subject.module->as<subjects::Tied>()->forward(other);
      barrier();
      EXPECT_EQ(detector.waits_of_host(), before);
      barrier();
      as_fsdp(*subject.module).reset_iter_state();
    }
  });
}

/// Four layers, each a unit.
torch::nn::Sequential sharded_layers(const FullyShardOptions& options) {
  torch::nn::Sequential layers;
  for (int i = 0; i < 4; ++i) {
    layers->push_back(torch::nn::Linear(6, 6));
    fully_shard(*layers[i], options);
  }
  fully_shard(*layers, options);
  return layers;
}

at::Tensor ones_that_require_grad(const Mesh& mesh) {
  return torch::ones({2, 6}, torch::TensorOptions().device(mesh.device())).requires_grad_();
}

std::vector<QueuedCollective> collectives_so_far(const Mesh& mesh, const std::string& name) {
  auto collectives = take_collectives(mesh.device());
  std::erase_if(collectives, [&](const QueuedCollective& each) { return each.name != name; });
  return collectives;
}

/// Each is one collective, however many parameters there are, and goes on while the units below are used.
TEST(OnStreams, AllReducesOverlapBackward) {
  for (const Arrangement& arrangement : {Arrangement{.shards = 2, .replicas = 2}, {.shards = 1, .replicas = 2}}) {
    on_devices(arrangement, [&](const Mesh& mesh) {
      auto layers = sharded_layers({.mesh = mesh});
      for (int step = 0; step < 3; ++step) {
        std::vector<QueuedCollective> reduced;
        Clock backward_of_third;
        at::Tensor x = ones_that_require_grad(mesh);
        for (int i = 0; i < 4; ++i) {
          x = layers[i]->as<torch::nn::Linear>()->forward(x);
          if (i == 2) {
            x.register_hook([&](const at::Tensor&) { // before its layer's backward, after the last layer's reduction
              reduced = collectives_so_far(mesh, "all-reduce");
              backward_of_third = queued_device::record(current_stream(mesh.device()));
            });
          }
        }
        take_collectives(mesh.device());
        x.sum().backward();
        const auto later = collectives_so_far(mesh, "all-reduce");
        ASSERT_EQ(reduced.size(), 1u);
        EXPECT_EQ(later.size(), 3u);
        EXPECT_FALSE(comes_after(backward_of_third, reduced[0].end));
        EXPECT_TRUE(comes_after(queued_device::record(current_stream(mesh.device())), later.back().end));
      }
    });
  }
}

TEST(OnStreams, AReduceScatterDoesNotWaitForTheAllReduceBeforeIt) {
  on_devices({.shards = 2, .replicas = 2}, [&](const Mesh& mesh) {
    auto layers = sharded_layers({.mesh = mesh});
    const auto x = ones_that_require_grad(mesh);
    const auto loss = layers->forward(x).sum();
    take_collectives(mesh.device());
    loss.backward();
    std::vector<QueuedCollective> scatters, reduces;
    for (auto& each : take_collectives(mesh.device())) {
      (each.name == "all-reduce" ? reduces : scatters).push_back(each);
    }
    std::erase_if(scatters, [](const QueuedCollective& each) { return each.name != "reduce-scatter"; });
    ASSERT_EQ(scatters.size(), 4u);
    ASSERT_EQ(reduces.size(), 4u);
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(comes_after(reduces[i].begin, scatters[i].end));
    }
    for (int i = 1; i < 4; ++i) {
      EXPECT_FALSE(comes_after(scatters[i].begin, reduces[i - 1].end));
    }
  });
}

/// Before an order of units was learned, a unit is released when the second next is touched. The gather of that one
/// need not wait for the unit in between.
TEST(OnStreams, TheFirstStepOverlaps) {
  queued_device::detector().begin_test();
  on_devices({2}, [](const Mesh& mesh) {
    auto layers = sharded_layers({.mesh = mesh});
    at::Tensor x = ones_that_require_grad(mesh);
    take_collectives(mesh.device());
    std::vector<Clock> after_layer;
    for (int i = 0; i < 4; ++i) {
      x = layers[i]->as<torch::nn::Linear>()->forward(x);
      after_layer.push_back(queued_device::record(current_stream(mesh.device())));
    }
    const auto gathers = collectives_so_far(mesh, "all-gather");
    ASSERT_EQ(gathers.size(), 4u);
    for (int i = 2; i < 4; ++i) {
      EXPECT_FALSE(comes_after(gathers[i].begin, after_layer[i - 1])) << "unit " << i;
      EXPECT_TRUE(comes_after(gathers[i].begin, after_layer[i - 2])) << "unit " << i;
    }
    x.sum().backward();
  });
  EXPECT_EQ(queued_device::detector().take_races(), Races());
}

std::optional<ShardPlacement> along_columns(const at::Tensor& param, const std::string&) {
  return ShardPlacement{.dim = param.dim() - 1};
}

/// A tower of four layers on one stream; another stream uses one of them too, beside it.
TEST(OnStreams, AUnitThatIsUsedOnTwoStreams) {
  for (const bool unpacked : {false, true}) {
    for (const bool recorded : {true, false}) {
      for (int shared = 0; shared < 4; ++shared) {
        SCOPED_TRACE(::testing::Message() << unpacked << " " << recorded << " " << shared);
        queued_device::detector().begin_test();
        on_devices({2}, [&](const Mesh& mesh) {
          FullyShardOptions options{.mesh = mesh, .reshard_after_forward = true};
          if (unpacked) {
            options.shard_placement_fn = along_columns;
          }
          auto layers = sharded_layers(options);
          const auto layer = [&](int i) { return layers[i]->as<torch::nn::Linear>(); };
          torch::optim::SGD optimizer(layers->parameters(), 0.1);
          const Stream here = current_stream(mesh.device()), beside = new_stream(mesh.device());
          const c10::AutoGradMode grad_mode(recorded);
          for (int step = 0; step < 3; ++step) {
            at::Tensor x = ones_that_require_grad(mesh), other = x;
            const at::Tensor input = x; // stays until both have read it
            wait_stream(beside, here);
            for (int i = 0; i < 4; ++i) {
              x = layer(i)->forward(x);
              if (i == shared) {
                const StreamGuard guard(beside);
                other = layer(i)->forward(input);
              }
            }
            wait_stream(here, beside);
            if (recorded) {
              (x.sum() + other.sum()).backward();
              optimizer.step();
            }
            wait_stream(beside, here); // what `other` leaves is used there again
          }
        });
        EXPECT_EQ(queued_device::detector().take_races(), Races());
      }
    }
  }
}

/// What a broken-off backward has left in flight is not waited for, but its memory is not used again too early.
TEST(OnStreams, StepsThatBreakOffWithReductionsInFlight) {
  for (const auto& [arrangement, separate_group] :
       {std::pair{Arrangement{.shards = 2}, false},
        {Arrangement{.shards = 2}, true},
        {Arrangement{.shards = 2, .replicas = 2}, false}}) {
    queued_device::detector().begin_test();
    on_devices(arrangement, [&, separate_group = separate_group](const Mesh& mesh) {
      auto layers = sharded_layers({.mesh = mesh});
      as_fsdp(*layers).set_separate_reduce_scatter_group(separate_group);
      for (int step = 0; step < 3; ++step) {
        at::Tensor x = ones_that_require_grad(mesh);
        for (int i = 0; i < 4; ++i) {
          if (i == 1) {
            x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("broken off"); });
          }
          x = layers[i]->as<torch::nn::Linear>()->forward(x);
        }
        EXPECT_ANY_THROW(x.sum().backward());
        as_fsdp(*layers).reset_iter_state();
        layers->forward(ones_that_require_grad(mesh)).sum().backward();
      }
    });
    EXPECT_EQ(queued_device::detector().take_races(), Races());
  }
}

/// The memory of writable copies is that of the stream that has written first.
TEST(OnStreams, AParameterWrittenAfterItWasReadOnAnotherStream) {
  queued_device::detector().begin_test();
  on_devices({2}, [](const Mesh& mesh) {
    const torch::NoGradGuard no_grad;
    auto layers = sharded_layers({.mesh = mesh});
    const Stream here = current_stream(mesh.device()), beside = new_stream(mesh.device());
    auto* layer = layers[0]->as<torch::nn::Linear>();
    const auto x = torch::ones({2, 6}, torch::TensorOptions().device(mesh.device()));
    for (int step = 0; step < 3; ++step) {
      wait_stream(beside, here);
      at::Tensor before = layer->forward(x), after;
      {
        const StreamGuard guard(beside);
        before = layer->forward(x);
      }
      layer->weight.mul_(2);
      wait_stream(beside, here);
      {
        const StreamGuard guard(beside);
        after = layer->forward(x);
      }
      layers[1]->as<torch::nn::Linear>()->forward(x);
      wait_stream(here, beside);
    }
  });
  EXPECT_EQ(queued_device::detector().take_races(), Races());
}

/// Autograd runs the backward of what was recorded on a stream on that stream.
TEST(OnStreams, GradientsOfOneUnitFromTwoStreams) {
  for (const bool bf16 : {false, true}) {
    queued_device::detector().begin_test();
    on_devices({2}, [&](const Mesh& mesh) {
      torch::nn::Sequential model(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6));
      FullyShardOptions options{.mesh = mesh};
      if (bf16) {
        options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
      }
      auto root = fully_shard(*model, options);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      const auto layer = [&](int i) { return model[i]->as<torch::nn::Linear>(); };
      const Stream here = current_stream(mesh.device()), beside = new_stream(mesh.device());
      for (int step = 0; step < 4; ++step) {
        root.set_requires_gradient_sync(step % 2 == 1);
        at::Tensor x = ones_that_require_grad(mesh), other = ones_that_require_grad(mesh), crossed;
        wait_stream(beside, here);
        x = layer(0)->forward(x);
        {
          const StreamGuard guard(beside);
          other = layer(1 - step / 2)->forward(other);
        }
        wait_stream(here, beside);
        (x.sum() + other.sum()).backward();
        optimizer.step();
        wait_stream(beside, here);
      }
    });
    EXPECT_EQ(queued_device::detector().take_races(), Races());
  }
}

struct HookThatReads : torch::autograd::PostAccumulateGradHook {
  explicit HookThatReads(int* calls) : device(rank()), calls(calls) {}
  void operator()(const torch::autograd::Variable& shard) override {
    EXPECT_TRUE(shard.grad().is_pinned());
    queued_device::detector().read_by_host(shard.grad().data_ptr(), device, "hook");
    ++*calls;
  }
  int device;
  int* calls;
};

/// Once, when all copies are on their way; hooks and users read gradients after that.
TEST(OnStreams, OffloadedGradientsAreWaitedForOnce) {
  auto& detector = queued_device::detector();
  for (const Arrangement& arrangement : {Arrangement{.shards = 2}, {.shards = 2, .replicas = 2}}) {
    detector.begin_test();
    on_devices(arrangement, [&](const Mesh& mesh) {
      auto layers = sharded_layers({.mesh = mesh, .offload_policy = CPUOffloadPolicy{}});
      int seen = 0;
      for (auto& shard : layers->parameters()) {
        torch::autograd::impl::set_post_acc_grad_hooks(shard, std::make_unique<HookThatReads>(&seen));
      }
      for (int step = 0; step < 3; ++step) { // gradients add up
        const auto loss = layers->forward(ones_that_require_grad(mesh)).sum();
        barrier();
        const int64_t before = detector.waits_of_host();
        barrier();
        loss.backward();
        barrier();
        EXPECT_EQ(detector.waits_of_host() - before, arrangement.ranks());
        barrier();
        EXPECT_EQ(seen, 8 * (step + 1));
      }
    });
    EXPECT_EQ(detector.take_races(), Races());
  }
}

} // namespace
} // namespace fsdp::testing
