#include "base/check.h"
#include "comm/c10d/nccl.h"

namespace fsdp {

bool nccl_available() {
  return false;
}

std::shared_ptr<Group> nccl_group(StorePtr, int, int, c10::Device, std::chrono::milliseconds) {
  fail(
      "[init] expected a libfsdp with NCCL, but this one was built against a LibTorch without CUDA or without NCCL's "
      "headers; "
      "install a CUDA build of LibTorch and libnccl-dev and rebuild");
}

} // namespace fsdp
