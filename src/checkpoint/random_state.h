#pragma once

#include <map>
#include <string>

#include <ATen/core/Tensor.h>

namespace fsdp::disk {

/// The states of this rank's random number generators, by what they serve: "cpu", and the device that it trains on.
std::map<std::string, at::Tensor> random_states();
/// An Error, which names the folder that they are from, if a generator does not take one.
void check_random_states(const std::string& folder, const std::map<std::string, at::Tensor>& states);
/// Those that are there.
void set_random_states(const std::map<std::string, at::Tensor>& states);

} // namespace fsdp::disk
