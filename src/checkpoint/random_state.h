#pragma once

#include <map>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace fsdp::disk {

/// On which this rank trains, for all that is known.
c10::Device training_device();

/// The states of this rank's random number generators, by what they serve: "cpu", and the device.
std::map<std::string, at::Tensor> random_states(c10::Device device);
/// An Error, which names the folder that they are from, if a generator does not take one.
void check_random_states(
    const std::string& folder, const std::map<std::string, at::Tensor>& states, c10::Device device);
/// Those that are there.
void set_random_states(const std::map<std::string, at::Tensor>& states, c10::Device device);

} // namespace fsdp::disk
