#pragma once

#include <map>
#include <string>

#include <ATen/core/Tensor.h>

namespace fsdp::disk {

/// The states of this rank's random number generators, by what they serve: "cpu", and the device that it trains on.
std::map<std::string, at::Tensor> random_states();
/// Those that are there.
void set_random_states(const std::map<std::string, at::Tensor>& states);

} // namespace fsdp::disk
