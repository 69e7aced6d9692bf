#include "nn/slots.h"

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

#include "engine/internal_scope.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"
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
    if (item.value().defined()) {
      std::function<void(const at::Tensor&)> replace;
      if (!handles_stay) { // where it is then: others may have been registered meanwhile
        replace = [&module, owner = module.weak_from_this().lock(), name = item.key()](const at::Tensor& tensor) {
          if (at::Tensor* place = registered_parameters(module).find(name)) {
            *place = tensor;
          }
        };
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

void settle_replaced_shards(torch::nn::Module& module) {
  for (const auto& [path, each] : modules_of(module)) {
    if (const auto unit = registry::find(*each)) {
      const auto guard = unit->runtime().lock();
      const engine::InternalScope scope;
      unit->settle_replaced_shards();
    }
  }
}

} // namespace fsdp::nn
