// FullyShardedDataParallel, with its arguments as in PyTorch: a policy chooses the units, gradients accumulate in
// no_sync, rank 0 gets the whole model in the end.
//
//   scripts/launch --ranks 2 build/bin/05_fsdp1

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>
#include <optional>

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    widen = register_module("widen", torch::nn::Linear(width, 4 * width));
    narrow = register_module("narrow", torch::nn::Linear(4 * width, width));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return x + narrow(torch::gelu(widen(x)));
  }
  torch::nn::Linear widen{nullptr}, narrow{nullptr};
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t width, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      blocks->push_back(Block(width));
    }
    register_module("blocks", blocks);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& block : *blocks) {
      x = block->as<Block>()->forward(x);
    }
    return norm(x);
  }
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Net); // plain LibTorch: nothing in it knows that it will be sharded

int main() {
  fsdp::init();
  torch::manual_seed(0);
  Net net(32, 4);
  // Each block is a unit, what remains (the norm) is the root's. With use_orig_params = true, parameters() would have
  // the parameters' own names.
  fsdp::FullyShardedDataParallel<Net> model(
      net,
      {.sharding_strategy = fsdp::ShardingStrategy::kFullShard,
       .auto_wrap_policy = fsdp::ModuleWrapPolicy::of<BlockImpl>()});
  for (const auto& parameter : model->named_parameters()) {
    std::cout << "rank " + std::to_string(fsdp::rank()) + " keeps " + std::to_string(parameter.value().numel()) +
                     " numbers in " + parameter.key() + "\n";
  }

  torch::optim::AdamW optimizer(model->parameters(), 3e-3);
  torch::manual_seed(1 + fsdp::rank());
  for (int step = 0; step < 20; ++step) {
    double sum = 0;
    for (int i = 0; i < 2; ++i) {
      // Gradients of the first micro-batch wait for the second's, without communication.
      const auto waiting = i == 0 ? std::optional(model.no_sync()) : std::nullopt;
      const auto x = torch::randn({16, 32}, fsdp::device());
      const auto loss = torch::mse_loss(model(x), x.flip(1)) / 2;
      loss.backward();
      sum += loss.item<double>();
    }
    model.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (step % 5 == 4 && fsdp::rank() == 0) {
      std::cout << "step " << step + 1 << "  loss " << sum << std::endl;
    }
  }

  // Whole values by the names of the unsharded model, which loads them.
  const auto state = fsdp::full_state_dict(model, {.rank0_only = true, .offload_to_cpu = true});
  if (fsdp::rank() == 0) {
    Net unsharded(32, 4);
    fsdp::load_state_dict(unsharded, state);
    std::cout << "rank 0 has all " << state.size() << " parameters, blocks.0.widen.weight among them: "
              << unsharded->blocks[0]->as<Block>()->widen->weight.sizes() << std::endl;
  }
}
