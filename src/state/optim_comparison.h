#pragma once

#include <fsdp/optim_state_dict.h>

#include "state/optimizer_by_name.h"

namespace fsdp::state {

/// An Error, with all complaints, if an optimizer cannot be given such a state.
void check_optim_state(
    const OptimizerByName& by_name,
    const OptimStateDict& dict,
    const torch::optim::Optimizer& optimizer,
    const char* operation);
void check_optim_state(
    const OptimizerByName& by_name,
    const ShardedOptimStateDict& dict,
    const torch::optim::Optimizer& optimizer,
    const char* operation);

} // namespace fsdp::state
