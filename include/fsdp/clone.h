#pragma once

#include <memory>

#include <fsdp/export.h>

namespace torch::nn {
class Module;
}

namespace fsdp {

/// A copy of a sharded model, sharded the same way, with its own shards (for an exponential moving average, a target
/// network). The module and its children must be `torch::nn::Cloneable`, as for `Module::clone`. Collective.
FSDP_API std::shared_ptr<torch::nn::Module> clone(torch::nn::Module& module);

template <typename ModuleType>
std::shared_ptr<ModuleType> clone(const std::shared_ptr<ModuleType>& module) {
  return std::dynamic_pointer_cast<ModuleType>(clone(static_cast<torch::nn::Module&>(*module)));
}

/// average = decay * average + (1 - decay) * model, shard by shard, without communication. Buffers are copied.
FSDP_API void ema_update_(torch::nn::Module& average, const torch::nn::Module& model, double decay);

} // namespace fsdp
