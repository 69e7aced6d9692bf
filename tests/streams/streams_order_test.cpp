// What waits for what on devices with streams, and what does not have to.

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "base/stream.h"
#include "engine/unit.h"
#include "nn/subjects.h"
#include "streams/devices.h"
#include "streams/parity_on_streams.h"
#include "streams/queued_device.h"
#include "streams/sharded_layers.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

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

class TheHostDoesNotWait : public ::testing::TestWithParam<Arrangement> {};
INSTANTIATE_TEST_SUITE_P(
    OnStreams, TheHostDoesNotWait, ::testing::Values(Arrangement{2}, Arrangement{2, 2}, Arrangement{1, 2}));

/// Otherwise it could not run ahead of the device.
void expect_no_wait_in_a_step(const Arrangement& arrangement, bool check_order) {
  auto& detector = queued_device::detector();
  const auto body = [&](const Mesh& mesh) {
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
  };
  on_devices(arrangement, body, check_order);
}

TEST_P(TheHostDoesNotWait, InAStep) {
  expect_no_wait_in_a_step(GetParam(), /*check_order=*/false);
}

TEST_P(TheHostDoesNotWait, WhereTheOrderIsChecked) {
  expect_no_wait_in_a_step(GetParam(), /*check_order=*/true);
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

/// Neither need the gathers of a step that departs from the order that was learned wait for the layer before them,
/// where what was gathered ahead is released unused.
TEST(OnStreams, AStepInAnotherOrderOverlaps) {
  queued_device::detector().begin_test();
  on_devices({2}, [](const Mesh& mesh) {
    auto layers = sharded_layers({.mesh = mesh});
    const std::vector<int> learned{0, 1, 2, 3};
    for (const std::vector<int>& order : {learned, learned, {0, 2, 1, 3}, {3, 1, 2, 0}}) {
      at::Tensor x = ones_that_require_grad(mesh);
      take_collectives(mesh.device());
      Clock before;
      for (const int i : order) {
        x = layers[i]->as<torch::nn::Linear>()->forward(x);
        for (const auto& gather : collectives_so_far(mesh, "all-gather")) {
          EXPECT_FALSE(order != learned && i != order[0] && comes_after(gather.begin, before)) << "unit " << i;
        }
        before = queued_device::record(current_stream(mesh.device()));
      }
      x.sum().backward();
    }
  });
  EXPECT_EQ(queued_device::detector().take_races(), Races());
}

void write_shards_that_were_gathered_and_left_unused(bool custom) {
  queued_device::detector().begin_test();
  on_devices({2}, [custom](const Mesh& mesh) {
    torch::nn::Linear layer(6, 6);
    auto unit = fully_shard(*layer, {.mesh = mesh});
    if (custom) {
      unit.set_custom_all_gather([](at::Tensor& output, const at::Tensor& input, Group& group) {
        output.zero_();
        output.view({group.size(), -1})[group.rank()].copy_(input);
        group.all_reduce(output, ReduceOp::kSum, 1, kTest)->wait();
      });
    }
    unit.unshard(/*async_op=*/true);
    unit.reshard();
    const torch::NoGradGuard no_grad;
    for (auto& shard : layer->parameters()) {
      shard.fill_(7);
    }
  });
  EXPECT_EQ(queued_device::detector().take_races(), Races());
}

/// The gather may still read them.
TEST(OnStreams, ShardsAreWrittenAfterAGatherThatWasLeftUnused) {
  write_shards_that_were_gathered_and_left_unused(/*custom=*/false);
  write_shards_that_were_gathered_and_left_unused(/*custom=*/true);
}

/// As the fused kernels of other libraries do, on the current stream.
void step_past_all_operators(at::Tensor& shard) {
  const at::Tensor gradient = shard.grad();
  ASSERT_TRUE(gradient.is_contiguous() && shard.is_contiguous());
  const auto stream = current_stream(shard.device());
  queued_device::use(gradient, /*writes=*/false, stream, "kernel of an optimizer");
  queued_device::use(shard, /*writes=*/true, stream, "kernel of an optimizer");
  auto* const values = static_cast<float*>(shard.data_ptr());
  for (int64_t i = 0; i < shard.numel(); ++i) {
    values[i] -= 0.125F * gradient.const_data_ptr<float>()[i];
  }
}

void step_with_an_operator(at::Tensor& shard) {
  const torch::NoGradGuard no_grad;
  shard.sub_(shard.grad(), 0.125);
}

std::vector<at::Tensor> losses_and_parameters(
    const Mesh& mesh, const FullyShardOptions& options, void (*write)(at::Tensor&)) {
  auto layers = sharded_layers(options);
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : layers->parameters()) {
      parameter.fill_(0.25);
    }
  }
  std::vector<at::Tensor> seen;
  for (int step = 0; step < 4; ++step) {
    layers->zero_grad();
    auto loss = layers->forward(ones_that_require_grad(mesh) * (rank() + 1)).tanh().sum();
    seen.push_back(loss.detach().cpu());
    loss.backward();
    for (auto& parameter : layers->parameters()) {
      write(parameter);
    }
  }
  for (auto& parameter : layers->parameters()) {
    seen.push_back(sharded(parameter).full_tensor().cpu());
  }
  return seen;
}

TEST(OnStreams, WritesThatNoOperatorShows) {
  for (const Arrangement& arrangement : {Arrangement{2}, {3}, {.shards = 2, .replicas = 2}}) {
    for (const auto& reshard : {ReshardAfterForward(true), ReshardAfterForward(false)}) {
      queued_device::detector().begin_test();
      on_devices(arrangement, [&](const Mesh& mesh) {
        const FullyShardOptions options{.mesh = mesh, .reshard_after_forward = reshard};
        const auto expected = losses_and_parameters(mesh, options, &step_with_an_operator);
        const auto seen = losses_and_parameters(mesh, options, &step_past_all_operators);
        ASSERT_EQ(seen.size(), expected.size());
        for (size_t i = 0; i < seen.size(); ++i) {
          EXPECT_TRUE(torch::equal(seen[i], expected[i])) << i;
        }
      });
      EXPECT_EQ(queued_device::detector().take_races(), Races());
    }
  }
}

void fill_past_all_operators(torch::nn::Module& layers, float value) {
  for (auto& shard : layers.parameters()) {
    queued_device::use(shard, /*writes=*/true, current_stream(shard.device()), "kernel of a loader");
    std::fill_n(static_cast<float*>(shard.data_ptr()), shard.numel(), value);
  }
}

/// Of four layers of six such values each.
void expect_forward_of(float value, torch::nn::Sequential& layers, const Mesh& mesh) {
  float expected = 1;
  for (int i = 0; i < 4; ++i) {
    expected = 6 * expected * value + value;
  }
  const auto seen = layers->forward(ones_that_require_grad(mesh)).detach().cpu();
  EXPECT_TRUE(seen.eq(expected).all().item<bool>()) << seen << " and not " << expected;
}

TEST(OnStreams, ValuesThatAreGivenAfterSharding) {
  for (const Arrangement& arrangement : {Arrangement{2}, {3}, {.shards = 2, .replicas = 2}}) {
    queued_device::detector().begin_test();
    on_devices(arrangement, [&](const Mesh& mesh) {
      auto layers = sharded_layers({.mesh = mesh});
      fill_past_all_operators(*layers, 0.25);
      expect_forward_of(0.25, layers, mesh);
    });
    EXPECT_EQ(queued_device::detector().take_races(), Races());
  }
}

TEST(OnStreams, WritesBetweenEvaluationsThatWereAnnounced) {
  for (const auto& reshard : {ReshardAfterForward(true), ReshardAfterForward(false)}) {
    queued_device::detector().begin_test();
    on_devices({2}, [&](const Mesh& mesh) {
      auto layers = sharded_layers({.mesh = mesh, .reshard_after_forward = reshard});
      const torch::NoGradGuard no_grad;
      for (const float value : {0.25F, 0.5F, 0.125F}) {
        as_fsdp(*layers).note_shard_writes();
        fill_past_all_operators(*layers, value);
        expect_forward_of(value, layers, mesh);
      }
    });
    EXPECT_EQ(queued_device::detector().take_races(), Races());
  }
}

/// As LocalSGD does: each replica is sharded by itself, and their shards are averaged.
TEST(OnStreams, CollectivesOfOursOnShards) {
  queued_device::detector().begin_test();
  on_devices({.shards = 2, .replicas = 2}, [](const Mesh& mesh) {
    auto layers = sharded_layers({.mesh = mesh["shard"]});
    const torch::NoGradGuard no_grad;
    for (int step = 0; step < 3; ++step) {
      for (const bool averages : {true, false}) {
        fill_past_all_operators(*layers, 0.25F * static_cast<float>(rank() / 2 + step));
        as_fsdp(*layers).note_shard_writes();
        expect_forward_of(0.25F * static_cast<float>(rank() / 2 + step), layers, mesh);
        Group& replicas = *mesh["replicate"].group();
        for (auto& shard : layers->parameters()) {
          averages ? replicas.all_reduce(shard, ReduceOp::kSum, 2, kTest)->wait() : replicas.broadcast(shard, 1, kTest);
        }
        const float expected =
            averages ? 0.125F + 0.25F * static_cast<float>(step) : 0.25F * static_cast<float>(1 + step);
        expect_forward_of(expected, layers, mesh);
      }
    }
  });
  EXPECT_EQ(queued_device::detector().take_races(), Races());
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
        const auto loss = x.sum();
        EXPECT_ANY_THROW(loss.backward({}, /*retain_graph=*/true));
        EXPECT_TRUE(contains(error_message([&] { loss.backward(); }), "the last backward broke off"));
        as_fsdp(*layers).reset_iter_state();
        layers->forward(ones_that_require_grad(mesh)).sum().backward();
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
