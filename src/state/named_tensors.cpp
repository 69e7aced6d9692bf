#include "state/named_tensors.h"

#include <algorithm>

#include <torch/nn/module.h>

#include "base/check.h"
#include "engine/bucket.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/hidden_parameters.h"
#include "nn/lowered_buffers.h"
#include "nn/registry.h"
#include "nn/slots.h"

namespace fsdp::state {

namespace {

// On some ranks perhaps: what they register then are plain tensors.
void check_not_summoned(const torch::nn::Module& module, const char* operation) {
  const auto unit = nn::registry::find(module);
  FSDP_CHECK(
      unit == nullptr || unit->summoned == 0,
      "[{}] the parameters are shown whole by summon_full_params: end that guard first, or read and write "
      "named_parameters(), which are whole now",
      operation);
}

} // namespace

c10::ScalarType NamedTensor::saved_dtype() const {
  return is_buffer ? nn::lowered_buffers::saved_dtype(tensor) : tensor.scalar_type();
}

engine::FlatShard* NamedTensor::flat() const {
  return param != nullptr ? param->bucket().flat_shard() : nullptr;
}

const at::Tensor& NamedTensor::trained() const {
  engine::FlatShard* flat_shard = flat();
  return flat_shard != nullptr ? flat_shard->tensor() : leaf();
}

std::vector<NamedTensor> named_tensors(ModuleRef given, const char* operation) {
  torch::nn::Module& module = given.for_operation(operation);
  nn::settle_replaced_shards(module);
  std::vector<NamedTensor> all;
  const auto add = [&](const std::string& path, const std::string& key, const at::Tensor& tensor, bool is_buffer) {
    if (tensor.defined() && engine::flat_shard_of(tensor) == nullptr) { // whose parameters have names of their own
      const std::string name = path.empty() ? key : path + "." + key;
      if (!is_buffer) {
        nn::check_not_left(tensor, name, operation);
      }
      all.push_back({name, tensor, engine::param_of(tensor), is_buffer});
    }
  };
  for (const auto& [path, each] : nn::modules_of(module)) {
    check_not_summoned(*each, operation);
    for (const auto& item : nn::registered_parameters(*each)) {
      const auto* hidden = item.value().defined() ? nullptr : nn::hidden_parameters::find(*each, item.key());
      add(path, item.key(), hidden != nullptr ? hidden->shard() : item.value(), /*is_buffer=*/false);
    }
    for (const auto& item : each->named_buffers(/*recurse=*/false)) {
      add(path, item.key(), item.value(), /*is_buffer=*/true);
    }
  }
  return all;
}

std::vector<std::shared_ptr<engine::Unit>> units_of(const std::vector<NamedTensor>& tensors) {
  std::vector<std::shared_ptr<engine::Unit>> units;
  for (const auto& tensor : tensors) {
    if (tensor.param != nullptr) {
      auto unit = tensor.param->unit().shared_from_this();
      if (std::find(units.begin(), units.end(), unit) == units.end()) {
        units.push_back(std::move(unit));
      }
    }
  }
  return units;
}

bool is_first_rank(const std::vector<NamedTensor>& tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.param != nullptr) {
      const Mesh& mesh = tensor.param->bucket().mesh();
      for (int dim = 0; dim < mesh.ndim(); ++dim) {
        if (mesh.coordinate(dim) != 0) {
          return false;
        }
      }
    }
  }
  return true;
}

HeldTensor held(const NamedTensor& tensor, bool first_rank) {
  HeldTensor held = fsdp::held(tensor.leaf());
  held.name = tensor.name;
  if (tensor.is_buffer) {
    held.local = held.local.to(tensor.saved_dtype());
  }
  held.first_replica = held.mesh ? held.first_replica : first_rank;
  return held;
}

} // namespace fsdp::state
