// Hybrid sharding: the model is sharded over some ranks, and such groups of ranks are replicas of each other. Four
// ranks, two replicas of a model sharded over two:
//
//   scripts/launch --ranks 4 build/bin/03_hybrid_mesh
//
// Parameters are gathered within a replica only; gradients are summed over all ranks. That suits machines whose ranks
// are well connected inside and less so among each other: replicate across machines, shard inside.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  fsdp::init();
  if (fsdp::world_size() % 2 != 0) {
    std::cerr
        << "03_hybrid_mesh needs an even number of ranks, such as: scripts/launch --ranks 4 build/bin/03_hybrid_mesh\n";
    return 1;
  }
  auto mesh = fsdp::init_device_mesh(fsdp::device().str(), {2, fsdp::world_size() / 2}, {"replicate", "shard"});

  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(64, 256), torch::nn::GELU(), torch::nn::Linear(256, 64));
  fsdp::fully_shard(model[0], {.mesh = mesh}); // two dimensions: (replicate, shard)
  auto root = fsdp::fully_shard(model, {.mesh = mesh});

  constexpr int kMicroBatches = 4;
  fsdp::optim::AdamW optimizer(model->parameters(), 1e-2);
  torch::manual_seed(1 + fsdp::rank());
  for (int step = 0; step < 20; ++step) {
    double sum = 0;
    for (int i = 0; i < kMicroBatches; ++i) {
      // Gradients add up without communication until the last micro-batch.
      root.set_requires_gradient_sync(i + 1 == kMicroBatches);
      auto x = torch::randn({16, 64}, fsdp::device());
      auto loss = torch::mse_loss(model->forward(x), x.flip(1)) / kMicroBatches;
      loss.backward();
      sum += loss.item<double>();
    }
    optimizer.step();
    optimizer.zero_grad();
    if (step % 5 == 4 && fsdp::rank() == 0) {
      std::cout << "step " << step + 1 << "  loss " << sum << std::endl;
    }
  }

  // Shards with the same place in their replicas hold the same values.
  double mine = model->parameters()[0].sum().item<double>();
  std::cout << "replica " + std::to_string(mesh["replicate"].coordinate()) + ", shard " +
                   std::to_string(mesh["shard"].coordinate()) + ": sum of the first weight's shard " +
                   std::to_string(mine) + "\n";
}
