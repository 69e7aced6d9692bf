#pragma once

#include <optional>

#include <torch/torch.h>

#include <fsdp/fsdp.h>

/// The smallest model of which FullyShardedDataParallel makes several units.
namespace fsdp::testing {

using Wrapped = FullyShardedDataParallel<torch::nn::Sequential>;

inline torch::nn::Sequential two_layers() {
  return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
}

/// Each of them a unit.
inline std::optional<AutoWrapPolicy> linears() {
  return ModuleWrapPolicy::of<torch::nn::Linear>();
}

} // namespace fsdp::testing
