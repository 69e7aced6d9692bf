#pragma once

#include <optional>
#include <string>
#include <vector>

#include <fsdp/group.h>
#include <fsdp/mesh.h>

#include "state/named_tensors.h"

namespace fsdp::state {

/// On which all of these lie; unset where nothing is sharded. An Error if they lie on several.
std::optional<Mesh> mesh_of(const std::vector<NamedTensor>& tensors, const char* operation);

/// What all ranks of a mesh say. Collective.
std::vector<std::string> from_all_ranks(const Mesh& mesh, const std::string& mine, const Label& label);

} // namespace fsdp::state
