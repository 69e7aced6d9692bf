#include <fsdp/call.h>

#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/checkpointed_modules.h"
#include "nn/registry.h"
#include "nn/strangers.h"

namespace fsdp {

namespace {

at::Tensor cast(const at::Tensor& tensor, const std::optional<c10::ScalarType>& dtype) {
  const bool needed = dtype && tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != *dtype;
  return needed ? tensor.to(*dtype) : tensor;
}

bool casts_inputs(const engine::Unit& unit) {
  return unit.precision().cast_forward_inputs || (unit.parent() == nullptr && unit.policy.casts_inputs_as_root);
}

} // namespace

Boundary::Boundary(ConstModuleRef given) : module_(given.for_operation("call")) {
  if (const auto unit = nn::registry::find(module_)) {
    if (unit->parent() == nullptr && c10::GradMode::is_enabled()) {
      nn::strangers::check_none(module_, "call");
    }
    const auto& precision = unit->precision();
    device_ = unit->device();
    input_dtype_ = casts_inputs(*unit) ? precision.param_dtype : std::nullopt;
    output_dtype_ = precision.output_dtype;
  }
}

at::Tensor Boundary::input(const at::Tensor& tensor) const {
  const bool elsewhere = device_ && tensor.defined() && tensor.device() != *device_;
  return cast(elsewhere ? tensor.to(*device_) : tensor, input_dtype_);
}

at::Tensor Boundary::output(const at::Tensor& tensor) const {
  return cast(tensor, output_dtype_);
}

bool Boundary::begins_checkpoint() const {
  return c10::GradMode::is_enabled() && nn::begins_checkpoint(module_);
}

void register_fsdp_forward_method(ModuleRef module, const std::string& method_name) {
  if (const auto unit = nn::registry::find(module.for_operation("register_fsdp_forward_method"))) {
    const auto lock = unit->runtime().lock();
    unit->forward_methods.insert(method_name);
  }
}

bool is_fsdp_forward_method(ConstModuleRef module, const std::string& method_name) {
  const auto unit = nn::registry::find(module.for_operation("is_fsdp_forward_method"));
  if (!unit || method_name == "forward") {
    return unit != nullptr;
  }
  const auto lock = unit->runtime().lock();
  return unit->forward_methods.count(method_name) > 0;
}

} // namespace fsdp
