// The model of the tests of streams.
#pragma once

#include <torch/torch.h>

#include <fsdp/fsdp.h>

namespace fsdp::testing {

/// Four layers, each a unit.
inline torch::nn::Sequential sharded_layers(const FullyShardOptions& options) {
  torch::nn::Sequential layers;
  for (int i = 0; i < 4; ++i) {
    layers->push_back(torch::nn::Linear(6, 6));
    fully_shard(*layers[i], options);
  }
  fully_shard(*layers, options);
  return layers;
}

inline at::Tensor ones_that_require_grad(const Mesh& mesh) {
  return torch::ones({2, 6}, torch::TensorOptions().device(mesh.device())).requires_grad_();
}

} // namespace fsdp::testing
