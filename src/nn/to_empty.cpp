#include <fsdp/fully_shard.h>

#include <ATen/ops/empty_like.h>
#include <torch/nn/module.h>

#include "base/check.h"
#include "engine/internal_scope.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/slots.h"

namespace fsdp {

namespace {

c10::Device device_of_units(const std::vector<Slot>& slots) {
  for (const auto& slot : slots) {
    if (const auto* param = engine::param_of(slot.tensor)) {
      return param->unit().device();
    }
  }
  fail("[to_empty] the module has no sharded parameter: call fully_shard first, or name the device");
}

} // namespace

void to_empty(ModuleRef given, std::optional<c10::Device> device) {
  torch::nn::Module& module = given.for_operation("to_empty");
  const auto slots = nn::slots_of(module);
  const c10::Device target = device ? *device : device_of_units(slots);
  const auto give_memory = [&](const at::Tensor& tensor) {
    const engine::InternalScope scope;
    if (tensor.is_meta()) {
      engine::take_data(tensor, at::empty_like(tensor, tensor.options().device(target)));
    }
  };
  for (const auto& slot : slots) {
    engine::Param* param = engine::param_of(slot.tensor);
    if (param == nullptr) {
      give_memory(slot.tensor); // an ignored one
    } else if (param->on_meta()) {
      param->give_memory(target);
    }
  }
  for (const auto& buffer : module.buffers()) {
    give_memory(buffer);
  }
  nn::settle_replaced_shards(module);
  nn::expect_first_values(module, "to_empty");
}

} // namespace fsdp
