#include "comm/c10d/factory.h"

#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL
#endif

#include <cstdlib>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/env.h"

namespace fsdp {
namespace {

using Nccl = c10d::ProcessGroupNCCL;

/// As it comes, LibTorch's watchdog ends the process when a collective fails. Asked to clean up only, it aborts the
/// communicator, and the program gets an exception.
void let_failures_be_exceptions() {
  constexpr const char* kCleanUpOnly = "2";
  if (!env::string("NCCL_ASYNC_ERROR_HANDLING")) { // its older name
    setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", kCleanUpOnly, /*overwrite=*/0);
  }
}

ProcessGroupPtr make_nccl(StorePtr store, int rank, int size, c10::Device device, std::chrono::milliseconds timeout) {
  const c10::DeviceGuard guard(device); // made on a thread of its own
  const auto options = Nccl::Options::create();
  options->timeout = timeout;
  const auto backend = c10::make_intrusive<Nccl>(store, rank, size, options);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(std::move(store), rank, size);
  group->setBoundDeviceId(device);
  group->setBackend(device.type(), c10d::ProcessGroup::NCCL, backend);
  group->setDefaultBackend(c10d::ProcessGroup::NCCL);
  return group;
}

} // namespace

MakeProcessGroup nccl_process_groups(c10::Device device, std::chrono::milliseconds timeout) {
  let_failures_be_exceptions();
  return [device, timeout](StorePtr store, int rank, int size) {
    return make_nccl(std::move(store), rank, size, device, timeout);
  };
}

} // namespace fsdp
