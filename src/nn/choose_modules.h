#pragma once

#include <fsdp/wrap.h>

namespace fsdp::nn {

/// As `modules_to_wrap`, of a model that may have units already.
std::vector<ModuleToWrap> choose_modules(
    torch::nn::Module& root, const AutoWrapPolicy& policy, const IgnoredStates& ignored = {});

} // namespace fsdp::nn
