#pragma once

#include <fsdp/fully_shard.h>
#include <fsdp/fully_sharded_data_parallel.h>
#include <torch/torch.h>

namespace bench {

constexpr int64_t kLinearWidth = 16;

struct UnitImpl : torch::nn::Module {
  explicit UnitImpl(int64_t linears) {
    for (int64_t i = 0; i < linears; ++i) {
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(kLinearWidth, kLinearWidth)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) {
      x = layer(x);
    }
    return x;
  }

  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Unit);

/// Units of tiny layers: what they take is the work around the computing.
struct LinearUnitsImpl : torch::nn::Module {
  LinearUnitsImpl(int64_t count, int64_t linears) {
    for (int64_t i = 0; i < count; ++i) {
      units.push_back(register_module(std::to_string(i), Unit(linears)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& unit : units) {
      x = unit(x);
    }
    return x;
  }
  void shard(const fsdp::FullyShardOptions& options) {
    for (auto& unit : units) {
      fsdp::fully_shard(*unit, options);
    }
    fsdp::fully_shard(*this, options);
  }

  std::vector<Unit> units;
};
TORCH_MODULE(LinearUnits);

using WrappedLinearUnits = fsdp::FullyShardedDataParallel<LinearUnits>;

inline WrappedLinearUnits wrap(const LinearUnits& model, const fsdp::Mesh& mesh) {
  fsdp::FSDPOptions options;
  options.auto_wrap_policy = fsdp::ModuleWrapPolicy::of<UnitImpl>();
  options.device_mesh = mesh;
  return WrappedLinearUnits(model, options);
}

} // namespace bench
