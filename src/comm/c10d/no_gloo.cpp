#include "base/check.h"
#include "comm/c10d/gloo.h"

namespace fsdp {

bool gloo_available() {
  return false;
}

MakeProcessGroup gloo_process_groups(std::chrono::milliseconds) {
  return nullptr;
}

std::shared_ptr<Group> gloo_group(StorePtr, int, int, std::chrono::milliseconds) {
  fail(
      "[init] expected a libfsdp with Gloo, but this one was built without its headers; apt-get install libgloo-dev "
      "and rebuild");
}

} // namespace fsdp
