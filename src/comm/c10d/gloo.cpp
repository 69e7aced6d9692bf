#include "comm/c10d/factory.h"

#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/env.h"

namespace fsdp {
namespace {

using Gloo = c10d::ProcessGroupGloo;

using Devices = std::vector<std::shared_ptr<gloo::transport::Device>>;

/// GLOO_SOCKET_IFNAME names the network interfaces, separated by commas, as in PyTorch; otherwise it is the one of the
/// host's name.
Devices network_devices() {
  std::istringstream names(env::string("GLOO_SOCKET_IFNAME").value_or(""));
  Devices devices;
  for (std::string name; std::getline(names, name, ',');) {
    if (!name.empty()) {
      devices.push_back(Gloo::createDeviceForInterface(name));
    }
  }
  return devices.empty() ? Devices{Gloo::createDefaultDevice()} : devices;
}

ProcessGroupPtr make_gloo(StorePtr store, int rank, int size, std::chrono::milliseconds timeout) {
  const auto options = Gloo::Options::create(timeout);
  options->devices = network_devices();
  options->threads = static_cast<int>(2 * options->devices.size());
  const auto backend = c10::make_intrusive<Gloo>(store, rank, size, options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(std::move(store), rank, size);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::GLOO, backend);
  group->setDefaultBackend(c10d::ProcessGroup::GLOO);
  return group;
}

} // namespace

MakeProcessGroup gloo_process_groups(std::chrono::milliseconds timeout) {
  return [timeout](StorePtr store, int rank, int size) { return make_gloo(std::move(store), rank, size, timeout); };
}

} // namespace fsdp
