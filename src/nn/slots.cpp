#include "nn/slots.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include "base/check.h"
#include "engine/at_work.h"
#include "engine/bucket.h"
#include "engine/flat_shard.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/hidden_parameters.h"
#include "nn/registry.h"

namespace fsdp::nn {

namespace {

// A module's registered parameters are protected; a derived class may see them.
struct Registered : torch::nn::Module {
  static constexpr auto kParameters = &Registered::parameters_;
};

bool reads_registered_parameters(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::ParameterListImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::ParameterDictImpl*>(&module) != nullptr;
}

// Where it is then: others may have been registered meanwhile.
std::function<void(const at::Tensor&)> replacer(torch::nn::Module& module, const std::string& name) {
  return [&module, owner = module.weak_from_this().lock(), name](const at::Tensor& tensor) {
    if (at::Tensor* place = registered_parameters(module).find(name)) {
      *place = tensor;
    }
  };
}

std::string join_path(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : (name.empty() ? prefix : prefix + "." + name);
}

} // namespace

torch::OrderedDict<std::string, at::Tensor>& registered_parameters(torch::nn::Module& module) {
  return module.*(Registered::kParameters);
}

const torch::OrderedDict<std::string, at::Tensor>& registered_parameters(const torch::nn::Module& module) {
  return module.*(Registered::kParameters);
}

std::vector<Slot> slots_of(torch::nn::Module& module, const std::string& prefix) {
  std::vector<Slot> slots;
  auto& own = registered_parameters(module);
  const bool handles_stay = reads_registered_parameters(module);
  for (auto& item : own) {
    if (engine::flat_shard_of(item.value()) != nullptr) {
      continue; // of parameters that have places of their own
    }
    if (!item.value().defined()) {
      if (auto* param = hidden_parameters::find(module, item.key())) {
        slots.push_back({join_path(prefix, item.key()), param->shard(), replacer(module, item.key())});
      }
    } else {
      std::function<void(const at::Tensor&)> replace;
      if (!handles_stay) {
        replace = replacer(module, item.key());
      }
      slots.push_back({join_path(prefix, item.key()), item.value(), std::move(replace)});
    }
  }
  for (auto& child : module.named_children()) {
    auto below = slots_of(*child.value(), join_path(prefix, child.key()));
    slots.insert(slots.end(), below.begin(), below.end());
  }
  return slots;
}

std::vector<Slot> flat_slots_of(torch::nn::Module& module) {
  std::vector<Slot> slots;
  for (const auto& [path, each] : modules_of(module)) {
    at::Tensor* flat = registered_parameters(*each).find(hidden_parameters::kFlatName);
    if (flat != nullptr && engine::flat_shard_of(*flat) != nullptr) {
      const std::string name = hidden_parameters::kFlatName;
      slots.push_back({join_path(path, name), *flat, replacer(*each, name)});
    }
  }
  return slots;
}

at::Tensor shown_in_place_of(const engine::Param& param) {
  return param.bucket().flat_shard() != nullptr ? at::Tensor() : param.shard();
}

std::vector<Slot> slots_of(const torch::jit::Module& module) {
  std::vector<Slot> slots;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    slots.push_back({item.name, item.value, nullptr});
  }
  return slots;
}

std::vector<std::pair<std::string, torch::nn::Module*>> modules_of(torch::nn::Module& module) {
  std::vector<std::pair<std::string, torch::nn::Module*>> modules;
  module.apply(torch::nn::Module::NamedModuleApplyFunction(
      [&](const std::string& path, torch::nn::Module& each) { modules.emplace_back(path, &each); }));
  return modules;
}

namespace {

void add(std::vector<std::shared_ptr<engine::Unit>>& units, std::shared_ptr<engine::Unit> unit) {
  if (unit && std::find(units.begin(), units.end(), unit) == units.end()) {
    units.push_back(std::move(unit));
  }
}

/// Of it and what is below it, and those above it that have its parameters.
std::vector<std::shared_ptr<engine::Unit>> units_of(torch::nn::Module& module) {
  std::vector<std::shared_ptr<engine::Unit>> units;
  for (const auto& [path, each] : modules_of(module)) {
    add(units, registry::find(*each));
  }
  for (auto& unit : nn::units_of(slots_of(module))) {
    add(units, std::move(unit));
  }
  return units;
}

} // namespace

std::vector<std::shared_ptr<engine::Unit>> units_of(const std::vector<Slot>& slots) {
  std::vector<std::shared_ptr<engine::Unit>> units;
  for (const auto& slot : slots) {
    const auto* param = engine::param_of(slot.tensor);
    add(units, param != nullptr ? param->unit().shared_from_this() : nullptr);
  }
  return units;
}

void check_not_left(const at::Tensor& parameter, const std::string& name, const char* operation) {
  FSDP_CHECK(
      !engine::is_left_shard(parameter),
      "[{}] '{}' is this rank's piece of a parameter that is gone, as the member that read it was given another "
      "(head->weight = embedding->weight, say) after fully_shard: tie weights before",
      operation,
      name);
}

void settle_replaced_shards(torch::nn::Module& module) {
  for (const auto& unit : units_of(module)) {
    const engine::AtWork at_work(unit->runtime());
    unit->settle_replaced_shards();
  }
}

void expect_first_values(torch::nn::Module& module, const char* operation) {
  engine::Runtime* last = nullptr;
  for (const auto& unit : units_of(module)) {
    if (std::exchange(last, &unit->runtime()) != &unit->runtime()) { // a root's units follow one another
      unit->runtime().expect_first_values(operation);
    }
  }
}

} // namespace fsdp::nn
