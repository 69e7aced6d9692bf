#pragma once

#include <string>
#include <vector>

#include <fsdp/state_dict.h>

#include "state/named_tensors.h"

/// Of a model with a state dict, before that is loaded. `Values`: StateDict or ShardedStateDict.
namespace fsdp::state {

/// Whether a tensor has elements to load, as one that is sparse or on the meta device has not.
bool has_values(const at::Tensor& tensor);
/// An Error if an optimizer's state of that name has none.
void check_has_values(const at::Tensor& tensor, const std::string& key, const std::string& name, const char* operation);

template <typename Values>
IncompatibleKeys compare(const std::vector<NamedTensor>& entries, const Values& state);

/// A line for each name and size that does not fit: none if all can be loaded.
template <typename Values>
std::vector<std::string> complaints(
    const std::vector<NamedTensor>& entries, const Values& state, const IncompatibleKeys& keys, bool strict);

} // namespace fsdp::state
