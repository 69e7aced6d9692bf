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

void set_unless_given(const char* name, const char* value) {
  setenv(name, value, /*overwrite=*/0);
}

/// As it comes, LibTorch's watchdog ends the process when a collective fails. Asked to clean up only, it aborts the
/// communicator, and the program gets an exception: at once, not after a minute for dumps that nobody has asked for.
void let_failures_be_exceptions() {
  constexpr const char* kCleanUpOnly = "2";
  if (!env::string("NCCL_ASYNC_ERROR_HANDLING")) { // its older name
    set_unless_given("TORCH_NCCL_ASYNC_ERROR_HANDLING", kCleanUpOnly);
  }
  if (!env::string("TORCH_NCCL_DUMP_ON_TIMEOUT")) {
    set_unless_given("TORCH_NCCL_DUMP_ON_TIMEOUT", "0");
    set_unless_given("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250"); // of which it waits four times as long
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
  backend->eagerConnectSingleDevice(device); // here, where an error is one of all ranks, not in a step
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
