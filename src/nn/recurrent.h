#pragma once

#include <torch/nn/module.h>

namespace fsdp::engine {
class Unit;
}

namespace fsdp::nn {

/// LibTorch's recurrent modules hold their parameters in a list only, which their `to()` fills with what is registered:
/// the shards. From now on they get the unit's handles back. For all modules below.
void remember_handles_of_recurrent(torch::nn::Module& module, const engine::Unit& unit);

} // namespace fsdp::nn
