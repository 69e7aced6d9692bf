// What is used, written and reduced on two streams is ordered as one stream would.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "base/stream.h"
#include "streams/devices.h"
#include "streams/parity_on_streams.h"
#include "streams/queued_device.h"
#include "streams/sharded_layers.h"

namespace fsdp::testing {
namespace {

/// Runs `body` on two devices, with a stream beside the current one of each; expects no race.
void on_two_streams(const std::function<void(const Mesh&, const Stream& here, const Stream& beside)>& body) {
  queued_device::detector().begin_test();
  on_devices({2}, [&](const Mesh& mesh) { body(mesh, current_stream(mesh.device()), new_stream(mesh.device())); });
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
        on_two_streams([&](const Mesh& mesh, const Stream& here, const Stream& beside) {
          FullyShardOptions options{.mesh = mesh, .reshard_after_forward = true};
          if (unpacked) {
            options.shard_placement_fn = along_columns;
          }
          auto layers = sharded_layers(options);
          const auto layer = [&](int i) { return layers[i]->as<torch::nn::Linear>(); };
          torch::optim::SGD optimizer(layers->parameters(), 0.1);
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
      }
    }
  }
}

/// The memory of writable copies is that of the stream that has written first.
TEST(OnStreams, AParameterWrittenAfterItWasReadOnAnotherStream) {
  on_two_streams([](const Mesh& mesh, const Stream& here, const Stream& beside) {
    const torch::NoGradGuard no_grad;
    auto layers = sharded_layers({.mesh = mesh});
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
}

/// The first write made the copies, on its stream; and it is from that that their memory may go to another unit's.
TEST(OnStreams, AParameterWrittenAgainOnAnotherStream) {
  on_two_streams([](const Mesh& mesh, const Stream& here, const Stream& beside) {
    const torch::NoGradGuard no_grad;
    auto layers = sharded_layers({.mesh = mesh});
    auto* layer = layers[0]->as<torch::nn::Linear>();
    for (int step = 0; step < 3; ++step) {
      wait_stream(beside, here);
      {
        const StreamGuard guard(beside);
        layer->weight.fill_(1);
      }
      wait_stream(here, beside);
      layer->weight.mul_(2);
      {
        const StreamGuard guard(beside);
        layers[1]->as<torch::nn::Linear>()->weight.fill_(3);
      }
      wait_stream(here, beside);
    }
    EXPECT_TRUE(layer->weight.detach().to(at::kCPU).eq(2).all().item<bool>());
  });
}

/// Who uses it on another stream, or writes it back, comes after.
TEST(OnStreams, DataGivenToAWholeParameterOnAnotherStream) {
  for (const bool used : {false, true}) {
    on_two_streams([&](const Mesh& mesh, const Stream& here, const Stream& beside) {
      const torch::NoGradGuard no_grad;
      auto layers = sharded_layers({.mesh = mesh});
      auto* layer = layers[0]->as<torch::nn::Linear>();
      const auto x = torch::ones({2, 6}, torch::TensorOptions().device(mesh.device()));
      for (int step = 0; step < 2; ++step) {
        auto whole = summon_full_params(*layers);
        layer->forward(x);
        wait_stream(beside, here);
        {
          const StreamGuard guard(beside);
          at::Tensor weight = layers->parameters()[0];
          weight.set_data(torch::full_like(weight, step));
        }
        if (used) {
          EXPECT_TRUE(torch::equal(layer->weight.cpu(), torch::full({6, 6}, step)));
        }
        whole.end();
        layer->forward(x);
      }
    });
  }
}

/// Autograd runs the backward of what was recorded on a stream on that stream.
TEST(OnStreams, GradientsOfOneUnitFromTwoStreams) {
  for (const bool bf16 : {false, true}) {
    on_two_streams([&](const Mesh& mesh, const Stream& here, const Stream& beside) {
      torch::nn::Sequential model(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6));
      FullyShardOptions options{.mesh = mesh};
      if (bf16) {
        options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
      }
      auto root = fully_shard(*model, options);
      torch::optim::SGD optimizer(model->parameters(), 0.1);
      const auto layer = [&](int i) { return model[i]->as<torch::nn::Linear>(); };
      for (int step = 0; step < 4; ++step) {
        root.set_requires_gradient_sync(step % 2 == 1);
        at::Tensor x = ones_that_require_grad(mesh), other = ones_that_require_grad(mesh);
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
  }
}

/// What is reduced is cast to the shards' dtype where it is delivered, and its memory is the reduce stream's.
TEST(OnStreams, GradientsThatAreCastOnTwoStreams) {
  on_two_streams([&](const Mesh& mesh, const Stream& here, const Stream& beside) {
    auto layers = sharded_layers({.mesh = mesh, .mp_policy = {.param_dtype = torch::kBFloat16}});
    const auto layer = [&](int i) { return layers[i]->as<torch::nn::Linear>(); };
    for (int step = 0; step < 3; ++step) {
      at::Tensor x = ones_that_require_grad(mesh), other = ones_that_require_grad(mesh);
      wait_stream(beside, here);
      for (int i = 0; i < 4; i += 2) {
        x = layer(i)->forward(x);
        const StreamGuard guard(beside);
        other = layer(i + 1)->forward(other);
      }
      wait_stream(here, beside);
      (x.sum() + other.sum()).backward();
      wait_stream(beside, here);
    }
  });
}

/// At the end of a backward they become one tensor, on the stream of the caller.
TEST(OnStreams, GradientsOfAFlatParameterThatWaitOnAnotherStream) {
  on_two_streams([&](const Mesh& mesh, const Stream& here, const Stream& beside) {
    torch::nn::Sequential layers(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6));
    FullyShardedDataParallel<torch::nn::Sequential> model(layers, {.use_orig_params = false, .device_mesh = mesh});
    for (int step = 0; step < 2; ++step) {
      for (int micro = 0; micro < 3; ++micro) {
        std::optional<FSDPInstance::NoSync> no_sync;
        if (micro < 2) {
          no_sync.emplace(model.no_sync());
        }
        at::Tensor loss;
        {
          const StreamGuard guard(beside);
          loss = model(ones_that_require_grad(mesh)).sum();
        }
        wait_stream(here, beside);
        loss.backward();
      }
      model->zero_grad();
      wait_stream(beside, here);
    }
  });
}

/// The first layer's backward begins, and takes back what users have put in the place of the second's.
TEST(OnStreams, AGradientThatWasReplacedWhileItWaitsForAnotherStreams) {
  on_two_streams([&](const Mesh& mesh, const Stream& here, const Stream& beside) {
    torch::nn::Sequential layers(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6));
    FullyShardedDataParallel<torch::nn::Sequential> model(
        layers,
        {.auto_wrap_policy = ModuleWrapPolicy::of<torch::nn::Linear>(), .use_orig_params = true, .device_mesh = mesh});
    for (int micro = 0; micro < 4; ++micro) {
      std::optional<FSDPInstance::NoSync> no_sync;
      if (micro != 3) {
        no_sync.emplace(model.no_sync());
      }
      const at::Tensor x = ones_that_require_grad(mesh);
      const at::Tensor second = layers[1]->as<torch::nn::Linear>()->forward(x);
      wait_stream(beside, here);
      at::Tensor first;
      {
        const StreamGuard guard(beside);
        first = layers[0]->as<torch::nn::Linear>()->forward(x);
      }
      wait_stream(here, beside);
      (first + second).sum().backward();
      auto& gradient = layers[1]->as<torch::nn::Linear>()->parameters()[0].mutable_grad();
      gradient = micro == 3 ? at::Tensor() : gradient * 0.5;
    }
  });
}

/// It was made on a stream on which nothing else of the unit's is done.
TEST(OnStreams, AGradientThatWasReplacedGoesWhenItHasBeenRead) {
  on_two_streams([&](const Mesh& mesh, const Stream& here, const Stream& beside) {
    torch::nn::Linear layer(6, 6);
    FullyShardedDataParallel<torch::nn::Linear> model(layer, {.use_orig_params = true, .device_mesh = mesh});
    for (int micro = 0; micro < 4; ++micro) {
      std::optional<FSDPInstance::NoSync> no_sync;
      if (micro != 3) {
        no_sync.emplace(model.no_sync());
      }
      {
        const StreamGuard guard(beside);
        model(ones_that_require_grad(mesh)).sum().backward();
      }
      const auto another = torch::ones({6, 6}, torch::TensorOptions().device(mesh.device()));
      wait_stream(here, beside);
      auto& gradient = layer->parameters()[0].mutable_grad();
      gradient = micro == 3 ? at::Tensor() : gradient * 0.5;
      wait_stream(beside, here);
    }
  });
}

} // namespace
} // namespace fsdp::testing
