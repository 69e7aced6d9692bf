// More than one machine: ranks meet at a TCP store and talk over the network. Here two "machines" are two terminals on
// one. In the first:
//
//   torchrun --no-python --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port 29500
//       build/bin/04_multi_host
//
// In the second the same with --node-rank 1. On real machines --master-addr is the first one's name. Without torchrun,
// start each of the four ranks with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  // Over TCP. Without a name, libfsdp finds out whether all ranks are on one host (and shares memory) or not (and uses
  // Gloo, or NCCL on GPUs), so on real machines plain fsdp::init() does.
  fsdp::init({.backend = "gloo", .timeout = std::chrono::seconds(60)});
  std::cout << "rank " + std::to_string(fsdp::rank()) + " of " + std::to_string(fsdp::world_size()) + ", number " +
                   std::to_string(fsdp::local_rank()) + " on its host, talks over " + fsdp::world()->name() + "\n";

  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(64, 256), torch::nn::GELU(), torch::nn::Linear(256, 64));
  fsdp::fully_shard(model[0]);
  fsdp::fully_shard(model);

  fsdp::optim::AdamW optimizer(model->parameters(), 1e-2);
  torch::manual_seed(1 + fsdp::rank());
  try {
    for (int step = 0; step < 50; ++step) {
      auto x = torch::randn({32, 64}, fsdp::device());
      auto loss = torch::mse_loss(model->forward(x), x.flip(1));
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      if (step % 10 == 9 && fsdp::rank() == 0) {
        std::cout << "step " << step + 1 << "  loss " << loss.item<float>() << std::endl;
      }
    }
  } catch (const fsdp::CommError& error) {
    // A rank that died, a cable pulled: every other rank ends here, with a message that names the rank, the unit and
    // the operation.
    std::cerr << std::string(error.what()) + "\n"; // in one piece: other ranks write there too
    return 1;
  }
}
