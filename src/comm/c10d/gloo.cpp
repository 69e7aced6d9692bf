#include "comm/c10d/gloo.h"

#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif

#include <utility>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "base/env.h"

namespace fsdp {
namespace {

using Gloo = c10d::ProcessGroupGloo;

/// GLOO_SOCKET_IFNAME names the network interface, as in PyTorch; otherwise the one of the host's name.
std::shared_ptr<gloo::transport::Device> network_device() {
  const auto interface = env::string("GLOO_SOCKET_IFNAME");
  return interface ? Gloo::createDeviceForInterface(*interface) : Gloo::createDefaultDevice();
}

ProcessGroupPtr make_gloo(StorePtr store, int rank, int size, std::chrono::milliseconds timeout) {
  const auto options = Gloo::Options::create(timeout);
  options->devices.push_back(network_device());
  ignore_broken_pipes();
  const auto backend = c10::make_intrusive<Gloo>(store, rank, size, options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(std::move(store), rank, size);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::GLOO, backend);
  group->setDefaultBackend(c10d::ProcessGroup::GLOO);
  return group;
}

} // namespace

bool gloo_available() {
  return true;
}

MakeProcessGroup gloo_process_groups(std::chrono::milliseconds timeout) {
  return [timeout](StorePtr store, int rank, int size) { return make_gloo(std::move(store), rank, size, timeout); };
}

std::shared_ptr<Group> gloo_group(StorePtr store, int rank, int size, std::chrono::milliseconds timeout) {
  const MakeProcessGroup make = gloo_process_groups(timeout);
  return c10d_group(make(std::move(store), rank, size), {.timeout = timeout, .make_process_group = make});
}

} // namespace fsdp
