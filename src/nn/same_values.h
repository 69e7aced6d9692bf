#pragma once

#include <string>
#include <vector>

#include "engine/agreement.h"
#include "engine/unit.h"

/// Ranks that shard one model are to begin with the same values.
namespace fsdp::nn {

/// A few letters for each parameter, which differ where the values do (as far as some of them tell).
std::string digests_of_values(const std::vector<engine::ParamSpec>& params);
/// Says which parameter differs first, on the first rank of `group`, once in a process.
void warn_of_other_values(
    const Group& group,
    const std::vector<engine::ParamSpec>& params,
    const std::string& mine,
    const engine::OtherText& other);

/// All ranks get the values of the first. Collective.
void broadcast_values(const engine::UnitSpec& spec, const std::vector<at::Tensor>& buffers);

} // namespace fsdp::nn
