#include <fsdp/call.h>

#include <map>
#include <mutex>
#include <set>

#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include "engine/unit.h"
#include "nn/fsdp_instance.h"
#include "nn/registry.h"
#include "nn/strangers.h"

namespace fsdp {

namespace {

std::mutex mutex;
// By unit: it dies with its module, whose address may be used again.
std::map<std::weak_ptr<engine::Unit>, std::set<std::string>, std::owner_less<>> forward_methods;

at::Tensor cast(const at::Tensor& tensor, const std::optional<c10::ScalarType>& dtype) {
  const bool needed = dtype && tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != *dtype;
  return needed ? tensor.to(*dtype) : tensor;
}

// FullyShardedDataParallel says it of roots and of others apart.
bool casts_inputs(const std::shared_ptr<engine::Unit>& unit) {
  const auto instance = nn::instances::find(unit);
  return unit->precision().cast_forward_inputs ||
         (instance && unit->parent() == nullptr && instance->options.mixed_precision.cast_root_forward_inputs);
}

} // namespace

Boundary::Boundary(ConstModuleRef given) {
  const torch::nn::Module& module = given.for_operation("call");
  if (const auto unit = nn::registry::find(module)) {
    if (unit->parent() == nullptr && c10::GradMode::is_enabled()) {
      nn::strangers::check_none(module, "call");
    }
    const auto& precision = unit->precision();
    device_ = unit->device();
    input_dtype_ = casts_inputs(unit) ? precision.param_dtype : std::nullopt;
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

void register_fsdp_forward_method(ModuleRef module, const std::string& method_name) {
  if (const auto unit = nn::registry::find(module.for_operation("register_fsdp_forward_method"))) {
    std::lock_guard lock(mutex);
    std::erase_if(forward_methods, [](const auto& item) { return item.first.expired(); });
    forward_methods[unit].insert(method_name);
  }
}

bool is_fsdp_forward_method(ConstModuleRef module, const std::string& method_name) {
  const auto unit = nn::registry::find(module.for_operation("is_fsdp_forward_method"));
  if (!unit || method_name == "forward") {
    return unit != nullptr;
  }
  std::lock_guard lock(mutex);
  auto found = forward_methods.find(unit);
  return found != forward_methods.end() && found->second.count(method_name) > 0;
}

} // namespace fsdp
