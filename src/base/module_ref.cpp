#include <fsdp/module_ref.h>

#include "base/check.h"

namespace fsdp::detail {

void refuse_empty_module(const char* operation) {
  fail(
      "[{}] expected a module, got an empty holder or a null pointer (nn::Linear fc{nullptr}, say): construct the "
      "module before",
      operation);
}

} // namespace fsdp::detail
