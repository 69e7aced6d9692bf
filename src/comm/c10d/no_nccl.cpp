#include "comm/c10d/factory.h"

namespace fsdp {

MakeProcessGroup nccl_process_groups(c10::Device, std::chrono::milliseconds) {
  return nullptr;
}

} // namespace fsdp
