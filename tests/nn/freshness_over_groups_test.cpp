// A root whose units are sharded over different groups: what is known of one group's shards says nothing of another's.

#include "nn/freshness.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

nn::Sequential two_layers() {
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  torch::manual_seed(1);
  return nn::Sequential(nn::Linear(6, 6), nn::Linear(6, 6));
}

std::vector<at::Tensor> train(nn::Sequential model) {
  torch::optim::SGD seen(model[1]->parameters(), kRate);
  std::vector<at::Tensor> outputs;
  for (int step = 0; step < 4; ++step) {
    const auto output = model->forward(torch::ones({2, 6}));
    outputs.push_back(output.detach());
    output.sum().backward();
    seen.step();
    if (rank() == step % world_size()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50)); // the others come to the next gather before its write
    }
    for (auto& parameter : model[0]->parameters()) {
      past_all_operators(parameter);
    }
    model->zero_grad();
  }
  return outputs;
}

void expect_the_same_as_unsharded() {
  const auto expected = train(two_layers());
  auto model = two_layers();
  const auto another = Mesh::from_groups({world()->split(0, {"test", ""})}, {"shard"}, c10::kCPU);
  fully_shard(*model[0]);
  fully_shard(*model[1], {.mesh = another});
  fully_shard(*model);
  expect_equal(train(model), expected);
}

TEST(FreshnessOverGroups, AWriteThatIsSeenInOneTellsNothingOfAnother) {
  on_threads(2, &expect_the_same_as_unsharded);
  on_processes(2, [] {
    init({.backend = "shm", .device = "cpu"});
    expect_the_same_as_unsharded();
    shutdown();
  });
}

} // namespace
} // namespace fsdp::testing
