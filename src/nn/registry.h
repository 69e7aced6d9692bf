#pragma once

#include <memory>

#include <torch/nn/module.h>

namespace fsdp::engine {
class Unit;
}

/// Which unit `fully_shard` made of a module. Forgets modules and units that are gone. Thread safe.
namespace fsdp::nn::registry {

/// Nobody else may hold the unit, but its handles and an earlier call of this.
void enter(torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit);
/// Null if the module has none.
std::shared_ptr<engine::Unit> find(const torch::nn::Module& module);

} // namespace fsdp::nn::registry
