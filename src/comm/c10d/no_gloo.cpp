#include "comm/c10d/factory.h"

namespace fsdp {

MakeProcessGroup gloo_process_groups(std::chrono::milliseconds) {
  return nullptr;
}

} // namespace fsdp
