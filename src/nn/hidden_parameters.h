#pragma once

#include <string>

#include <torch/nn/module.h>

namespace fsdp::engine {
class Param;
class Unit;
} // namespace fsdp::engine

/// Where users see a unit's parameters as one flat parameter, the places in which these were registered are undefined
/// (as LibTorch's own are, of a Linear without bias), and the flat shard stands in the unit's module beside them. Which
/// parameter belongs in which place is remembered here. Thread safe.
namespace fsdp::nn::hidden_parameters {

inline constexpr const char* kFlatName = "_flat_param";

void enter(torch::nn::Module& module, const std::string& name, engine::Param& param);
/// Null if none belongs there.
engine::Param* find(const torch::nn::Module& module, const std::string& name);

} // namespace fsdp::nn::hidden_parameters
