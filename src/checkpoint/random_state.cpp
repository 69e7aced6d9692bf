#include "checkpoint/random_state.h"

#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <fsdp/init.h>

#include "base/check.h"

namespace fsdp::disk {

namespace {

std::map<std::string, at::Generator> generators(c10::Device device) {
  std::map<std::string, at::Generator> generators{{"cpu", at::detail::getDefaultCPUGenerator()}};
  if (!device.is_cpu()) {
    generators[c10::DeviceTypeName(device.type(), /*lower_case=*/true)] = at::globalContext().defaultGenerator(device);
  }
  return generators;
}

} // namespace

c10::Device training_device() {
  return is_initialized() ? device() : c10::Device(c10::kCPU);
}

std::map<std::string, at::Tensor> random_states(c10::Device device) {
  std::map<std::string, at::Tensor> states;
  for (auto& [name, generator] : generators(device)) {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    states[name] = generator.get_state();
  }
  return states;
}

void check_random_states(
    const std::string& folder, const std::map<std::string, at::Tensor>& states, c10::Device device) {
  for (auto& [name, generator] : generators(device)) {
    if (const auto found = states.find(name); found != states.end()) {
      try {
        generator.clone().set_state(found->second);
      } catch (const c10::Error& error) {
        fail(
            "[load] {} has no state of this LibTorch's '{}' generator ({}): load without `random_numbers`",
            folder,
            name,
            error.what_without_backtrace());
      }
    }
  }
}

void set_random_states(const std::map<std::string, at::Tensor>& states, c10::Device device) {
  for (auto& [name, generator] : generators(device)) {
    if (const auto found = states.find(name); found != states.end()) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(found->second);
    }
  }
}

} // namespace fsdp::disk
