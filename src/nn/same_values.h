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

/// All ranks of a mesh get the values of the first. Nothing for tensors without plain memory. Collective.
void broadcast_from_first(const at::Tensor& tensor, const Mesh& mesh, const Label& label);
/// The same of all parameters of a unit, and of buffers that no module below has sent.
void broadcast_values(const engine::UnitSpec& spec, const std::vector<at::Tensor>& buffers);
/// Buffers that `broadcast_values` has sent, where they are now.
void note_sent(const std::vector<at::Tensor>& buffers);

} // namespace fsdp::nn
