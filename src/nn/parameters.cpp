#include <unordered_set>

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <fsdp/sharded_tensor.h>

#include "engine/bucket.h"
#include "engine/param.h"
#include "engine/tenant.h"
#include "nn/slots.h"
#include "nn/strangers.h"

namespace fsdp {

namespace {

std::vector<std::pair<std::string, at::Tensor>> shards_of(const std::vector<Slot>& slots) {
  std::vector<std::pair<std::string, at::Tensor>> shards;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& slot : slots) {
    engine::Param* param = engine::param_of(slot.tensor);
    if (param != nullptr && param->bucket().flat_shard() != nullptr) {
      continue; // it is seen in that
    }
    if (param != nullptr) {
      param->follow_requires_grad(); // of the handle, which nobody tells us of
      param->follow_dropped_gradient();
    }
    const at::Tensor tensor = param != nullptr ? param->shard() : slot.tensor;
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
      shards.emplace_back(slot.path, tensor);
    }
  }
  return shards;
}

std::vector<at::Tensor> without_names(const std::vector<std::pair<std::string, at::Tensor>>& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named) {
    tensors.push_back(tensor);
  }
  return tensors;
}

} // namespace

std::vector<std::pair<std::string, at::Tensor>> named_parameters(ConstModuleRef given) {
  const torch::nn::Module& module = given.for_operation("parameters");
  nn::strangers::check_none(module, "parameters");
  auto& mutable_module = const_cast<torch::nn::Module&>(module);
  auto slots = nn::slots_of(mutable_module);
  const auto flat_slots = nn::flat_slots_of(mutable_module);
  slots.insert(slots.end(), flat_slots.begin(), flat_slots.end());
  return shards_of(slots);
}

std::vector<std::pair<std::string, at::Tensor>> named_parameters(const torch::jit::Module& module) {
  return shards_of(nn::slots_of(module));
}

std::vector<at::Tensor> parameters(ConstModuleRef module) {
  return without_names(named_parameters(module));
}

std::vector<at::Tensor> parameters(const torch::jit::Module& module) {
  return without_names(named_parameters(module));
}

} // namespace fsdp
