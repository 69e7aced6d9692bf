#pragma once

#include <torch/nn/module.h>

/// Which modules `apply_activation_checkpointing` has marked. Thread safe.
namespace fsdp::nn {

/// A call of the module begins at its boundary: whether it is to run through a checkpoint.
bool begins_checkpoint(const torch::nn::Module& module);

} // namespace fsdp::nn
