#pragma once

#include <fsdp/optim_state_dict.h>

#include "state/optimizer_by_name.h"

namespace fsdp::state {

/// What `load_optim_state_dict` gives to an optimizer: an Error here, and nothing has changed yet; afterwards nothing
/// goes wrong. Tensors that are as the optimizer would have made them become its own.
MadeState make_optim_state(ModuleRef module, torch::optim::Optimizer& optimizer, ShardedOptimStateDict&& dict);

} // namespace fsdp::state
