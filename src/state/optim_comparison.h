#pragma once

#include <fsdp/optim_state_dict.h>

#include "state/optimizer_by_name.h"

namespace fsdp::state {

/// An Error, with all complaints, if an optimizer cannot be given such a state.
void check_optim_state(const OptimizerOfModel& here, const OptimStateDict& dict);
void check_optim_state(const OptimizerOfModel& here, const ShardedOptimStateDict& dict);

} // namespace fsdp::state
