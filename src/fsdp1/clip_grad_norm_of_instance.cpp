#include <optional>

#include <fsdp/clip_grad_norm.h>
#include <fsdp/fully_sharded_data_parallel.h>

#include "base/log.h"

namespace fsdp {

namespace {

std::optional<c10::ScalarType> dtype_of_gradients(const std::vector<at::Tensor>& parameters) {
  std::optional<c10::ScalarType> dtype;
  for (const auto& parameter : parameters) {
    if (const at::Tensor& gradient = parameter.grad(); gradient.defined()) {
      dtype = dtype ? c10::promoteTypes(*dtype, gradient.scalar_type()) : gradient.scalar_type();
    }
  }
  return dtype;
}

} // namespace

at::Tensor FSDPInstance::clip_grad_norm_(double max_norm, double norm_type) const {
  const auto parameters = parameters_between_steps("clip_grad_norm_");
  const at::Tensor norm = fsdp::clip_grad_norm_(parameters, max_norm, {.norm_type = norm_type});
  const auto dtype = dtype_of_gradients(parameters);
  if (!dtype) {
    log::warn(
        "[clip_grad_norm_] called on rank {} with no gradients -- returning the total norm in the default dtype "
        "torch.float32",
        log::rank());
  }
  return norm.to(c10::toRealValueType(dtype.value_or(c10::kFloat)));
}

} // namespace fsdp
