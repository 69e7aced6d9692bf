// Compute in bfloat16 with float32 weights, and keep the weights in host memory:
//
//   scripts/launch --ranks 2 build/bin/02_mixed_precision_and_offload
//
// The shards, their gradients and the optimizer stay in float32. Each gather casts them to bfloat16 on the way, so the
// whole parameters that forward and backward see take half the memory, and half the communication.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  fsdp::init();
  torch::manual_seed(0);
  torch::nn::Sequential model(
      torch::nn::Linear(128, 512),
      torch::nn::GELU(),
      torch::nn::Linear(512, 512),
      torch::nn::GELU(),
      torch::nn::Linear(512, 128));

  fsdp::FullyShardOptions options{
      .mp_policy =
          {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat32}, // sum gradients in full precision
      .offload_policy = fsdp::CPUOffloadPolicy{}, // shards live on the host; on a CPU they do anyway
  };
  fsdp::fully_shard(model[0], options);
  fsdp::fully_shard(model[2], options);
  fsdp::fully_shard(model, options);
  if (fsdp::rank() == 0) {
    std::cout << fsdp::describe(model).str() << std::endl; // the units, their dtypes and the memory they need
  }

  fsdp::optim::AdamW optimizer(model->parameters(), 3e-3); // torch's AdamW in one fused pass
  torch::manual_seed(1 + fsdp::rank());
  for (int step = 0; step < 50; ++step) {
    auto x = torch::randn({32, 128}).to(fsdp::device());
    auto y = fsdp::call(model, x); // as model->forward(x), with x cast to bfloat16 on the way in
    auto loss = torch::mse_loss(y.to(torch::kFloat32), x.flip(1));
    loss.backward();
    fsdp::clip_grad_norm_(model, 1.0); // by the norm of the whole model's gradient, not of this rank's part
    optimizer.step();
    optimizer.zero_grad();
    if (step % 10 == 9 && fsdp::rank() == 0) {
      std::cout << "step " << step + 1 << "  loss " << loss.item<float>() << "  computed in " << y.dtype() << std::endl;
    }
  }
}
