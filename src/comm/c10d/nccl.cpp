#include "comm/c10d/nccl.h"

#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL
#endif

#include <cstdlib>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "base/env.h"
#include "comm/c10d/join_group.h"

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

bool nccl_available() {
  return true;
}

std::shared_ptr<Group> nccl_group(
    StorePtr store, int rank, int size, c10::Device device, std::chrono::milliseconds timeout) {
  let_failures_be_exceptions();
  const MakeProcessGroup make = [device, timeout](StorePtr own_store, int own_rank, int count) {
    return make_nccl(std::move(own_store), own_rank, count, device, timeout);
  };
  const Joining joining{
      .store = std::move(store),
      .rank = rank,
      .size = size,
      .timeout = timeout,
      .backend = "nccl",
      .label = {"init", ""}};
  return c10d_group(join_group(make, joining), {.timeout = timeout, .make_process_group = make});
}

} // namespace fsdp
