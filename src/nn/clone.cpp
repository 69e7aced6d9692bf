#include <fsdp/clone.h>

#include <map>

#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <fsdp/front_end.h>
#include <fsdp/fully_shard.h>
#include <fsdp/sharded_tensor.h>

#include "base/check.h"
#include "engine/bucket.h"
#include "engine/internal_scope.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/registry.h"
#include "nn/slots.h"

namespace fsdp {

namespace {

using engine::Unit;

/// Tensors without elements, in place of the registered shards; put back at the end.
class NoValues {
 public:
  explicit NoValues(torch::nn::Module& module) {
    for (auto& slot : nn::slots_of(module)) {
      const auto* param = engine::param_of(slot.tensor);
      if (param != nullptr && slot.replace) {
        slot.replace(at::empty({0}, param->shard().options().requires_grad(false)));
        slots_.push_back({slot, param->shard()});
      }
    }
  }
  ~NoValues() {
    for (auto& [slot, shard] : slots_) {
      slot.replace(shard);
    }
  }

 private:
  std::vector<std::pair<Slot, at::Tensor>> slots_;
};

/// A call of `fully_shard`, to be repeated on the copy.
struct UnitRecipe {
  std::shared_ptr<Unit> unit;
  std::vector<std::string> paths;
  std::map<std::string, ShardPlacement> placements; // by the parameter's path from the root
};

UnitRecipe& recipe_for(const std::shared_ptr<Unit>& unit, std::vector<UnitRecipe>& recipes) {
  for (auto& recipe : recipes) {
    if (recipe.unit == unit) {
      return recipe;
    }
  }
  return recipes.emplace_back(UnitRecipe{.unit = unit, .paths = {}, .placements = {}});
}

/// Parents come before their children.
std::vector<UnitRecipe> recipes_of(torch::nn::Module& root) {
  std::vector<UnitRecipe> recipes;
  for (const auto& item : root.named_modules("", /*include_self=*/true)) {
    if (auto unit = nn::registry::find(*item.value())) {
      recipe_for(unit, recipes).paths.push_back(item.key());
    }
  }
  for (const auto& slot : nn::slots_of(root)) {
    const auto* param = engine::param_of(slot.tensor);
    if (param == nullptr) {
      continue;
    }
    for (auto& recipe : recipes) {
      if (recipe.unit.get() == &param->unit()) {
        FSDP_CHECK(
            !param->bucket().options().extended,
            "[clone] '{}' is gathered by a GatherExtension, which cannot be copied: build the model anew and load its "
            "state_dict",
            slot.path);
        recipe.placements[slot.path] = {param->layout().dim(), param->bucket().options().mesh};
      }
    }
  }
  return recipes;
}

FullyShardOptions options_of(const UnitRecipe& recipe) {
  const Unit& unit = *recipe.unit;
  FullyShardOptions options;
  options.mesh = unit.mesh();
  if (unit.policy.reshard_to) {
    options.reshard_after_forward = *unit.policy.reshard_to;
  } else if (unit.policy.reshard_after_forward) {
    options.reshard_after_forward = *unit.policy.reshard_after_forward;
  }
  options.mp_policy = unit.precision();
  if (unit.offloaded()) {
    options.offload_policy = *unit.offload_policy();
  }
  // The copy's modules give paths of their own, relative to each of them: a suffix of the path from the root.
  options.shard_placement_fn = [recipe](const at::Tensor&, const std::string& name) -> std::optional<ShardPlacement> {
    for (const auto& path : recipe.paths) {
      auto found = recipe.placements.find(path.empty() ? name : path + "." + name);
      if (found != recipe.placements.end()) {
        return found->second;
      }
    }
    return std::nullopt;
  };
  return options;
}

// Clones are made by constructing anew, which forgets what is frozen.
void copy_requires_grad(torch::nn::Module& from, torch::nn::Module& to) {
  auto originals = nn::slots_of(from), copies = nn::slots_of(to);
  TORCH_INTERNAL_ASSERT(originals.size() == copies.size());
  for (size_t i = 0; i < copies.size(); ++i) {
    const auto* param = engine::param_of(originals[i].tensor);
    copies[i].tensor.set_requires_grad(param != nullptr ? param->trainable() : originals[i].tensor.requires_grad());
  }
}

/// Gives the copy's parameters their values, whole, where the originals belong to `unit`; returns the other parameters.
std::vector<at::Tensor> fill_those_of(Unit& unit, torch::nn::Module& original, torch::nn::Module& copy) {
  const auto originals = nn::slots_of(original), copies = nn::slots_of(copy);
  std::map<const engine::Param*, at::Tensor> wholes;
  unit.before_shard_read();
  for (const auto& bucket : unit.buckets()) {
    const c10::Device target = unit.offloaded() ? c10::Device(c10::kCPU) : unit.device();
    const auto values = bucket->put_together(target, unit.label("clone"));
    for (size_t i = 0; i < values.size(); ++i) {
      wholes[bucket->params()[i]] = values[i];
    }
  }
  std::vector<at::Tensor> others;
  for (size_t i = 0; i < copies.size(); ++i) {
    at::Tensor parameter = copies[i].tensor;
    const auto found = wholes.find(engine::param_of(originals[i].tensor));
    if (found == wholes.end()) {
      others.push_back(parameter);
    } else {
      parameter.set_data(found->second);
    }
  }
  return others;
}

} // namespace

std::shared_ptr<torch::nn::Module> clone(torch::nn::Module& module) {
  nn::settle_replaced_shards(module);
  const auto recipes = recipes_of(module);
  FSDP_CHECK(!recipes.empty(), "[clone] the module is not sharded: call fully_shard first, or use module->clone()");
  std::shared_ptr<torch::nn::Module> copy;
  {
    const NoValues no_values(module);
    copy = module.clone();
  }
  for (const auto& recipe : recipes) {
    recipe.unit->follow_requires_grad();
  }
  copy_requires_grad(module, *copy);
  std::map<std::string, torch::nn::Module*> modules{{"", copy.get()}};
  for (const auto& item : copy->named_modules("", /*include_self=*/false)) {
    modules[item.key()] = item.value().get();
  }
  for (auto item = recipes.rbegin(); item != recipes.rend(); ++item) { // children first
    const UnitRecipe& recipe = *item;
    std::vector<torch::nn::Module*> same;
    for (const auto& path : recipe.paths) {
      same.push_back(modules.at(path));
    }
    auto options = options_of(recipe);
    options.ignored_params = fill_those_of(*recipe.unit, module, *copy);
    auto sharded_copy = fully_shard(same, options);
    copy_settings(FSDPModule(recipe.unit), sharded_copy);
    Unit& unit = *sharded_copy.unit();
    auto lock = unit.runtime().lock();
    engine::InternalScope scope;
    unit.exchange_as(*recipe.unit);
  }
  return copy;
}

void ema_update_(torch::nn::Module& average, const torch::nn::Module& model, double decay) {
  c10::AutoGradMode no_grad(false);
  auto averages = parameters(average), values = parameters(model);
  auto average_buffers = average.buffers(), buffers = model.buffers();
  FSDP_CHECK(
      averages.size() == values.size() && average_buffers.size() == buffers.size(),
      "[ema_update_] the average has {} parameters and the model {}: make the average with fsdp::clone(model)",
      averages.size(),
      values.size());
  for (size_t i = 0; i < averages.size(); ++i) {
    FSDP_CHECK(
        averages[i].sizes() == values[i].sizes(),
        "[ema_update_] shard {} has sizes {} in the average and {} in the model: make the average with "
        "fsdp::clone(model)",
        i,
        averages[i].sizes(),
        values[i].sizes());
    if (averages[i].is_floating_point() || averages[i].is_complex()) {
      averages[i].lerp_(values[i].detach(), 1 - decay);
    } else {
      averages[i].copy_(values[i].detach()); // as buffers: a count has no average
    }
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    average_buffers[i].copy_(buffers[i]);
  }
}

} // namespace fsdp
