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
#include "base/log.h"
#include "comm/words.h"

namespace fsdp {
namespace {

using c10d::ProcessGroupNCCL;

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
  set_unless_given("TORCH_NCCL_DUMP_ON_TIMEOUT", "0");
  set_unless_given("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250"); // of which it waits four times as long
}

/// Its destructor takes leave of the other ranks. LibTorch's own aborts, and a rank that is still sending, or waiting,
/// gets an error.
class Nccl final : public ProcessGroupNCCL {
 public:
  using ProcessGroupNCCL::ProcessGroupNCCL;
  ~Nccl() override {
    try {
      if (!is_aborted_ && getError() == c10d::ErrorType::SUCCESS) {
        shutdown();
      }
    } catch (const std::exception& error) {
      log::debug("an NCCL group did not end in order: {}", message_of(error));
    }
  }
  void abort() override {
    is_aborted_ = true;
    ProcessGroupNCCL::abort();
  }

 private:
  bool is_aborted_ = false;
};

ProcessGroupPtr make_nccl(StorePtr store, int rank, int size, c10::Device device, std::chrono::milliseconds timeout) {
  const c10::DeviceGuard guard(device); // made on a thread of its own
  const auto options = ProcessGroupNCCL::Options::create();
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
