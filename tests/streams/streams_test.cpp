// Training in all its forms, on a device with streams.

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "base/stream.h"
#include "comm/c10d/order_check.h"
#include "engine/unit.h"
#include "nn/combinations.h"
#include "nn/subjects.h"
#include "streams/devices.h"
#include "streams/parity_on_streams.h"
#include "streams/queued_device.h"
#include "streams/sharded_layers.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

TEST(OnStreams, TheOrderCheckDoesNotWaitForTheDevice) {
  const c10::Device device = queued_device::device(0);
  const auto record = [](const std::string& unit, c10::Device to) {
    return adapter::order_record({{"test", unit}, "all-reduce", 0}, 32, to);
  };
  const at::Tensor all = at::cat({record("here", at::kCPU), record("there", at::kCPU)}).to(device);
  const int64_t waits = queued_device::detector().waits_of_host();
  adapter::OrderRecords records;
  records.add(all, record("here", device));
  EXPECT_EQ(records.find_mismatch(0, 2), "");
  EXPECT_EQ(queued_device::detector().waits_of_host(), waits);
  synchronize(current_stream(device));
  EXPECT_TRUE(contains(records.find_mismatch(0, 2), "'there'"));
}

TEST(OnStreams, WhatIsIgnoredStaysOnTheHost) {
  on_devices({2}, [](const Mesh& mesh) {
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 4));
    const FullyShardedDataParallel<torch::nn::Sequential> wrapped(
        model, {.ignored_modules = {*model[1]}, .device_id = mesh.device(), .device_mesh = mesh});
    for (const auto& states : {model[1]->parameters(), model[1]->buffers()}) {
      for (const auto& state : states) {
        EXPECT_TRUE(state.is_cpu());
      }
    }
    for (const auto& parameter : fsdp::parameters(model)) {
      EXPECT_TRUE(!is_sharded(parameter) || parameter.device() == mesh.device());
    }
  });
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
    const SummonOptions on_rank_0{.writeback = false, .rank0_only = true, .offload_to_cpu = true};
    EXPECT_LE(units_at_once(mesh, [&](const auto& model) { summon_full_params(*model, on_rank_0).end(); }), 3.0);
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

TEST(OnStreams, WhatComesFromTheHostIsInTheMemoryThatDescribeSays) {
  on_devices({1}, [](const Mesh& mesh) {
    torch::nn::Linear model(4, 4);
    const Mesh alone = Mesh::from_groups({group_of_one()}, {"shard"}, mesh.device());
    auto root = fully_shard(*model, {.mesh = alone, .offload_policy = CPUOffloadPolicy{}});
    const auto description = describe(*model);
    root.unshard();
    EXPECT_EQ(root.unit()->whole_bytes(), 20 * 4);
    const int64_t whole_gradients = 20 * 4;
    EXPECT_GE(description.bytes_peak, 2 * description.bytes_shard + whole_gradients + root.unit()->whole_bytes());
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

TEST(OnStreams, EventsOfTheOptimizersOfRootsThatShareTheirStreams) {
  queued_device::detector().begin_test();
  on_devices({2}, [&](const Mesh& mesh) {
    torch::nn::Linear linear(7, 5), head(5, 3);
    std::vector<FSDPModule> roots{fully_shard(*linear, {.mesh = mesh}), fully_shard(*head, {.mesh = mesh})};
    share_comm_ctx(roots);
    const Stream compute = current_stream(mesh.device());
    const std::vector<Stream> streams{new_stream(mesh.device()), new_stream(mesh.device())};
    for (int step = 0; step < 3; ++step) {
      const auto loss = head(torch::relu(linear(subjects::data(rank(), step, {4, 7})))).sum();
      for (const Stream& stream : streams) {
        wait_stream(compute, stream); // gradients are added to what the optimizers have read
      }
      loss.backward();
      for (size_t i = 0; i < roots.size(); ++i) {
        wait_stream(streams[i], compute);
        const StreamGuard on_its_stream(streams[i]);
        torch::optim::SGD(i == 0 ? linear->parameters() : head->parameters(), 0.1).step();
        auto event = std::make_shared<c10::Event>(c10::kHPU);
        event->record(streams[i]);
        roots[i].set_post_optim_event(event);
      }
    }
  });
  EXPECT_EQ(queued_device::detector().take_races(), Races());
}

TEST(OnStreams, ACopyIsOfWhatAnOptimizerWritesOnAnotherStream) {
  queued_device::detector().begin_test();
  on_devices({2}, [&](const Mesh& mesh) {
    auto layers = sharded_layers({.mesh = mesh});
    layers->forward(ones_that_require_grad(mesh)).sum().backward();
    const Stream other = new_stream(mesh.device());
    wait_stream(other, current_stream(mesh.device()));
    {
      const StreamGuard on_the_other(other);
      torch::optim::SGD(layers->parameters(), 0.1).step();
    }
    auto event = std::make_shared<c10::Event>(c10::kHPU);
    event->record(other);
    as_fsdp(*layers).set_post_optim_event(event);
    const auto copy = fsdp::clone(layers);
  });
  EXPECT_EQ(queued_device::detector().take_races(), Races());
}

TEST(OnStreams, RootsThatShareTheirStreamsWhenOneHasRun) {
  queued_device::detector().begin_test();
  on_devices({2}, [&](const Mesh& mesh) {
    const torch::NoGradGuard no_grad;
    torch::nn::Linear first(7, 5), second(5, 3);
    const auto root = fully_shard(*first, {.mesh = mesh}), other = fully_shard(*second, {.mesh = mesh});
    const auto x = first(subjects::data(rank(), 0, {4, 7}));
    for (auto& parameter : second->parameters()) {
      parameter.mul_(2);
    }
    share_comm_ctx({root, other});
    second(x);
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
  auto offloaded = combinations::all();
  std::erase_if(offloaded, [](const auto& c) { return !c.offload; });
  for (const auto& combination : combinations::some(offloaded, /*together=*/3)) {
    SCOPED_TRACE(combinations::name_of(combination));
    Trial trial = combinations::trial_of(combination, /*ranks=*/2);
    trial.steps = 2;
    expect_parity_without_races(trial, combinations::arrangement_of(combination, /*ranks=*/2));
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

} // namespace
} // namespace fsdp::testing
