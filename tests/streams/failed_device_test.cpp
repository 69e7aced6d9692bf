// What is given back on a device that has failed.

#include <functional>
#include <stdexcept>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "base/stream.h"
#include "streams/devices.h"
#include "streams/queued_device.h"

namespace fsdp::testing {
namespace {

const Label kTest{"test", "unit"};

/// From here until all ranks are through `body`, everything on their devices is an error.
void while_devices_fail(const std::function<void()>& body) {
  barrier();
  queued_device::fail_events(true);
  body();
  barrier();
  queued_device::fail_events(false);
  barrier();
}

TEST(OnStreams, AGatherThatIsGivenBackOnAFailedDeviceDoesNotEndTheProcess) {
  on_devices({2}, [&](const Mesh& mesh) {
    const std::vector<Piece> of_two{{8, 4, at::kFloat, at::kFloat}}, of_one{{8, 8, at::kFloat, at::kFloat}};
    const auto home = mesh.group()->make_home(of_two, {mesh.device()}, kTest);
    const auto home_alone = group_of_one()->make_home(of_one, {mesh.device()}, kTest);
    auto gathered = home->gather(kTest), gathered_alone = home_alone->gather(kTest);
    gathered->wait();
    gathered_alone->wait();
    const StreamGuard other(new_stream(mesh.device()));
    while_devices_fail([&] {
      gathered.reset();
      gathered_alone.reset();
    });
  });
}

/// Its backward has broken off, and its reductions are as it left them.
TEST(OnStreams, AModelThatGoesOnAFailedDeviceDoesNotEndTheProcess) {
  for (const Arrangement& arrangement : {Arrangement{.shards = 2}, {.shards = 2, .replicas = 2}}) {
    on_devices(arrangement, [&](const Mesh& mesh) {
      torch::nn::Sequential layers(torch::nn::Linear(6, 6), torch::nn::Linear(6, 6), torch::nn::Linear(6, 6));
      for (const auto& layer : *layers) {
        fully_shard(*layer.ptr(), {.mesh = mesh});
      }
      fully_shard(*layers, {.mesh = mesh});
      at::Tensor x = torch::ones({2, 6}, torch::TensorOptions().device(mesh.device())).requires_grad_();
      x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("broken off"); });
      EXPECT_ANY_THROW(layers->forward(x).sum().backward());
      x.reset();
      while_devices_fail([&] { layers = nullptr; });
    });
  }
}

} // namespace
} // namespace fsdp::testing
