#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace fsdp::engine {
class Unit;
}

/// Parameters below a sharded module that `fully_shard` has not seen, as of a module that was put in another one's
/// place: each rank would train them on its own, without a word.
namespace fsdp::nn::strangers {

/// What a call of `fully_shard` has seen and left alone.
void note_ignored(const std::shared_ptr<engine::Unit>& unit, const std::vector<at::Tensor>& ignored);
/// An error that names the first stranger. Not while whole parameters are shown. Thread safe.
void check_none(const torch::nn::Module& module, const char* operation);

} // namespace fsdp::nn::strangers
