#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/nn/module.h>

#include <fsdp/front_end.h>

namespace fsdp::nn {

/// A unit's parameters are cut as one, laid one after another, and not each along a dimension.
struct FlatCut {
  int64_t alignment = 1; ///< bytes, of a multiple of which each parameter begins
};

/// One unit of the parameters of these modules, those excepted that are in units already. Collective.
std::shared_ptr<engine::Unit> make_unit(
    const std::vector<ModuleView>& modules,
    const FullyShardOptions& options,
    const std::optional<FlatCut>& flat = std::nullopt);

/// The same of modules that are told apart by the registry.
std::shared_ptr<engine::Unit> make_unit(
    const std::vector<torch::nn::Module*>& modules,
    const FullyShardOptions& options,
    const std::optional<FlatCut>& flat = std::nullopt);

} // namespace fsdp::nn
