#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/nn/module.h>

#include <fsdp/front_end.h>

#include "engine/unit.h"

namespace fsdp::nn {

using fsdp::FlatCut;

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
