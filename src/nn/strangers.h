#pragma once

#include <torch/nn/module.h>

/// Parameters below a sharded module that `fully_shard` has not seen, as of a module that was put in another one's
/// place: each rank would train them on its own, without a word.
namespace fsdp::nn::strangers {

/// An error that names the first stranger. Not while whole parameters are shown. Thread safe.
void check_none(const torch::nn::Module& module, const char* operation);

} // namespace fsdp::nn::strangers
