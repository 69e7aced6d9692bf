#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/group.h>
#include <fsdp/mesh.h>

#include "state/named_tensors.h"

namespace fsdp::state {

/// On which all of these lie; unset where nothing is sharded. An Error if they lie on several.
std::optional<Mesh> mesh_of(const std::vector<NamedTensor>& tensors, const char* operation);

/// What `body` gives, or why it throws: to be told to other ranks, so that none waits for one that fails alone.
std::string text_or_reason(const std::function<std::string()>& body);
/// The text that was told so; an Error if it is a reason.
std::string text_in(const std::string& told);

/// What all ranks of a mesh say; this one alone, if there is none. Collective.
std::vector<std::string> from_all_ranks(const std::optional<Mesh>& mesh, const std::string& mine, const Label& label);
/// An Error on all ranks of a mesh where `check` throws on one. Collective.
void check_on_all_ranks(const std::optional<Mesh>& mesh, const Label& label, const std::function<void()>& check);

} // namespace fsdp::state
