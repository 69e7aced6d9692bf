// The least that makes a LibTorch program sharded. Two ranks on this machine:
//
//   scripts/launch --ranks 2 build/bin/01_fully_shard
//
// Also: torchrun --no-python --nproc-per-node 2 ..., mpirun -n 2 ..., or alone.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  fsdp::init(); // joins the ranks that the launcher started

  torch::manual_seed(0); // all ranks build the same model
  torch::nn::Sequential model(torch::nn::Linear(64, 256), torch::nn::GELU(), torch::nn::Linear(256, 64));
  fsdp::fully_shard(model[0]); // a unit of its own: gathered when it is needed, freed when it is not
  fsdp::fully_shard(model); // what is left of the model

  torch::optim::AdamW optimizer(model->parameters(), 1e-2); // of this rank's shards
  torch::manual_seed(1 + fsdp::rank()); // each rank learns from other data
  for (int step = 0; step < 50; ++step) {
    auto x = torch::randn({32, 64}, fsdp::device());
    auto loss = torch::mse_loss(model->forward(x), x.flip(1)); // an ordinary forward,
    loss.backward(); // an ordinary backward: afterwards each shard has its gradient, the mean over all ranks
    optimizer.step();
    optimizer.zero_grad();
    if (step % 10 == 9 && fsdp::rank() == 0) {
      std::cout << "step " << step + 1 << "  loss " << loss.item<float>() << std::endl;
    }
  }

  for (const auto& [name, shard] : fsdp::named_parameters(model)) {
    auto whole = fsdp::sharded(shard).sizes;
    std::cout << "rank " + std::to_string(fsdp::rank()) + " keeps " + c10::str(shard.sizes()) + " of " + name + " " +
                     c10::str(at::IntArrayRef(whole)) + "\n";
  }
}
