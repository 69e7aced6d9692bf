#pragma once

#include <string>
#include <vector>

#include <fsdp/optim_state_dict.h>

/// Optimizer states without their elements, as ranks tell each other of them.
namespace fsdp::state {

std::string encode(const OptimStateDict& state);
/// With tensors on the meta device.
OptimStateDict decode(const std::string& text);

/// Of what the ranks have of the same parameters, all that any has. Scalars are those of ranks that have elements,
/// which must agree: what has none was perhaps never updated.
OptimStateDict merge(const std::vector<OptimStateDict>& of_ranks, const char* operation);

} // namespace fsdp::state
