#include <fsdp/clone.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <fsdp/front_end.h>
#include <fsdp/fully_shard.h>
#include <fsdp/sharded_tensor.h>

#include "base/check.h"
#include "engine/at_work.h"
#include "engine/bucket.h"
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
};

UnitRecipe& recipe_for(const std::shared_ptr<Unit>& unit, std::vector<UnitRecipe>& recipes) {
  for (auto& recipe : recipes) {
    if (recipe.unit == unit) {
      return recipe;
    }
  }
  return recipes.emplace_back(UnitRecipe{.unit = unit, .paths = {}});
}

/// Parents come before their children.
std::vector<UnitRecipe> recipes_of(torch::nn::Module& root) {
  std::vector<UnitRecipe> recipes;
  std::set<const Unit*> units;
  for (const auto& [path, module] : nn::modules_of(root)) {
    if (auto unit = nn::registry::find(*module)) {
      recipe_for(unit, recipes).paths.push_back(path);
      units.insert(unit.get());
    }
  }
  for (const auto& slot : nn::slots_of(root)) {
    const auto* param = engine::param_of(slot.tensor);
    FSDP_CHECK(
        param == nullptr || units.empty() || units.count(&param->unit()) != 0,
        "[clone] '{}' belongs to a unit of modules outside of this one: clone a module that has them too, or call "
        "fully_shard on this one before the one above",
        slot.path);
    FSDP_CHECK(
        param == nullptr || !param->bucket().is_extended(),
        "[clone] '{}' is gathered by a GatherExtension, which cannot be copied: build the model anew and load its "
        "state_dict",
        slot.path);
    FSDP_CHECK(
        param == nullptr || !param->unit().flat(),
        "[clone] '{}' is part of a flat parameter, of which no copies are made: build and wrap a second model, and "
        "give "
        "it this one's values by full_state_dict and load_state_dict",
        slot.path);
  }
  return recipes;
}

FullyShardOptions options_of(const Unit& unit) {
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

/// The copy's parameters, unit by unit.
struct CopiedParams {
  std::map<const c10::TensorImpl*, ShardPlacement> placements; ///< of those that have their values
  std::vector<at::Tensor> others; ///< are none of the copy's next unit
};

std::unordered_map<const engine::Param*, at::Tensor> wholes_of(Unit& unit) {
  unit.before_shard_read();
  const engine::AtWork at_work(unit.runtime());
  return unit.put_together(unit.offloaded() ? c10::Device(c10::kCPU) : unit.device(), "clone");
}

/// Gives the copy's parameters their values, whole, where the originals belong to `unit`. What one tensor was in
/// modules of several units may be several in the copy: a later unit has what an earlier one has not taken.
void fill_those_of(Unit& unit, torch::nn::Module& original, torch::nn::Module& copy, CopiedParams& copied) {
  const auto originals = nn::slots_of(original), copies = nn::slots_of(copy);
  const auto wholes = wholes_of(unit);
  copied.others.clear();
  for (size_t i = 0; i < copies.size(); ++i) {
    at::Tensor parameter = copies[i].tensor;
    if (const auto found = wholes.find(engine::param_of(originals[i].tensor)); found != wholes.end()) {
      parameter.set_data(found->second);
      const engine::Param& param = *found->first;
      copied.placements[parameter.unsafeGetTensorImpl()] = {param.layout().dim(), param.bucket().mesh()};
    } else if (copied.placements.count(parameter.unsafeGetTensorImpl()) == 0) {
      copied.others.push_back(parameter);
    }
  }
}

void check_all_sharded(torch::nn::Module& original, torch::nn::Module& copy) {
  const auto originals = nn::slots_of(original), copies = nn::slots_of(copy);
  for (size_t i = 0; i < copies.size(); ++i) {
    FSDP_CHECK(
        engine::param_of(originals[i].tensor) == nullptr || engine::param_of(copies[i].tensor) != nullptr,
        "[clone] '{}' is one tensor with a weight elsewhere, and in the copy no sharded module has it: shard a module "
        "that has both before, or build the copy with the same ties (clone_into)",
        copies[i].path);
  }
}

/// How a sharded module's units were made.
std::vector<UnitRecipe> check_recipes_of(torch::nn::Module& module) {
  nn::settle_replaced_shards(module);
  auto recipes = recipes_of(module);
  FSDP_CHECK(!recipes.empty(), "[clone] the module is not sharded: call fully_shard first, or use module->clone()");
  for (const auto& recipe : recipes) {
    FSDP_CHECK(
        recipe.unit->summoned == 0,
        "[clone] was called while parameters are shown whole: call it after the guard of summon_full_params has ended, "
        "or use module->clone() for a copy that is not sharded");
    recipe.unit->follow_requires_grad();
  }
  return recipes;
}

/// The copy, whose parameters have no values yet, gets them and is sharded, unit by unit.
void shard_copy(const std::vector<UnitRecipe>& recipes, torch::nn::Module& module, torch::nn::Module& copy) {
  copy_requires_grad(module, copy);
  std::map<std::string, torch::nn::Module*> modules;
  for (const auto& [path, each] : nn::modules_of(copy)) {
    modules[path] = each;
  }
  CopiedParams copied;
  for (auto item = recipes.rbegin(); item != recipes.rend(); ++item) { // children first
    const UnitRecipe& recipe = *item;
    std::vector<torch::nn::Module*> same;
    for (const auto& path : recipe.paths) {
      same.push_back(modules.at(path));
    }
    auto options = options_of(*recipe.unit);
    fill_those_of(*recipe.unit, module, copy, copied);
    options.ignored_params = copied.others;
    options.shard_placement_fn = [&](const at::Tensor& parameter, const std::string&) -> std::optional<ShardPlacement> {
      const auto found = copied.placements.find(parameter.unsafeGetTensorImpl());
      return found == copied.placements.end() ? std::nullopt : std::optional(found->second);
    };
    auto sharded_copy = fully_shard(same, options);
    copy_settings(FSDPModule(recipe.unit), sharded_copy);
    Unit& unit = *sharded_copy.unit();
    const engine::AtWork at_work(unit.runtime());
    unit.exchange_as(*recipe.unit);
  }
  check_all_sharded(module, copy);
}

// -- a copy that somebody else has built

template <typename Item>
std::vector<std::string> paths_of(const std::vector<Item>& items) {
  std::vector<std::string> paths;
  for (const auto& item : items) {
    paths.push_back(item.first);
  }
  return paths;
}

void check_same_names(const char* what, const std::vector<std::string>& wanted, const std::vector<std::string>& got) {
  const auto [one, other] = std::mismatch(wanted.begin(), wanted.end(), got.begin(), got.end());
  FSDP_CHECK(
      one == wanted.end() && other == got.end(),
      "[clone] expected a copy built like the model, whose {}{}, got one where they {}: build it with the same "
      "arguments",
      what,
      one == wanted.end() ? " end there" : " go on with '" + *one + "'",
      other == got.end() ? "end" : "go on with '" + *other + "'");
}

void check_same_sizes(const std::string& path, c10::IntArrayRef wanted, c10::IntArrayRef got) {
  FSDP_CHECK(
      wanted == got,
      "[clone] expected a copy built like the model, where '{}' has sizes {}, got one where it has {}: build it with "
      "the same arguments",
      path,
      wanted,
      got);
}

/// All slots, then all buffers.
std::vector<std::pair<std::string, at::Tensor>> tensors_of(torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& slot : nn::slots_of(module)) {
    tensors.emplace_back(slot.path, slot.tensor);
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined()) {
      tensors.emplace_back(item.key(), item.value());
    }
  }
  return tensors;
}

/// Names of one tensor in the model are names of one tensor in the copy.
class SameTies {
 public:
  void check(const std::string& path, const void* original, const void* copy) {
    const bool same = copies_.try_emplace(original, copy).first->second == copy &&
                      originals_.try_emplace(copy, original).first->second == original;
    FSDP_CHECK(
        same,
        "[clone] expected a copy whose parameters share tensors as the model's do, got one where '{}' does not: tie "
        "the same weights in it",
        path);
  }

 private:
  std::map<const void*, const void*> copies_, originals_;
};

using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>; // of the model, of the copy

Pairs check_alike(torch::nn::Module& module, torch::nn::Module& copy) {
  check_same_names("modules", paths_of(nn::modules_of(module)), paths_of(nn::modules_of(copy)));
  const auto originals = tensors_of(module), copies = tensors_of(copy);
  check_same_names("parameters and buffers", paths_of(originals), paths_of(copies));
  Pairs pairs;
  SameTies ties;
  for (size_t i = 0; i < originals.size(); ++i) {
    const auto& [path, original] = originals[i];
    const at::Tensor& tensor = copies[i].second;
    FSDP_CHECK(
        engine::param_of(tensor) == nullptr,
        "[clone] expected a copy as it was built, got one that is sharded ('{}' is): leave that to clone",
        path);
    const auto* param = engine::param_of(original);
    check_same_sizes(path, param != nullptr ? param->layout().sizes() : original.sizes(), tensor.sizes());
    const void* identity = param;
    ties.check(path, param != nullptr ? identity : original.unsafeGetTensorImpl(), tensor.unsafeGetTensorImpl());
    pairs.emplace_back(original, tensor);
  }
  return pairs;
}

/// What is not sharded gets its values, and what will be loses those that it has.
void copy_others(const Pairs& pairs) {
  const engine::InternalScope scope;
  for (const auto& [original, tensor] : pairs) {
    const bool is_sharded = engine::param_of(original) != nullptr;
    engine::take_data(
        tensor, is_sharded ? at::empty({0}, tensor.options().device(c10::kCPU)) : original.detach().clone());
  }
}

// Parents first, as each takes along what is below.
void copy_modes(torch::nn::Module& module, torch::nn::Module& copy) {
  const auto originals = nn::modules_of(module), copies = nn::modules_of(copy);
  for (size_t i = 0; i < copies.size(); ++i) {
    if (const bool training = originals[i].second->is_training(); copies[i].second->is_training() != training) {
      copies[i].second->train(training);
    }
  }
}

} // namespace

std::shared_ptr<torch::nn::Module> clone(ModuleRef given) {
  const engine::NoInferenceMode no_inference; // the copy may be trained
  torch::nn::Module& module = given.for_operation("clone");
  const auto recipes = check_recipes_of(module);
  std::shared_ptr<torch::nn::Module> copy;
  {
    const NoValues no_values(module);
    copy = module.clone();
  }
  shard_copy(recipes, module, *copy);
  return copy;
}

void clone_into(ModuleRef given, ModuleRef given_copy) {
  const engine::NoInferenceMode no_inference;
  torch::nn::Module &module = given.for_operation("clone"), &copy = given_copy.for_operation("clone");
  const auto recipes = check_recipes_of(module);
  copy_others(check_alike(module, copy));
  copy_modes(module, copy);
  shard_copy(recipes, module, copy);
}

void ema_update_(ModuleRef given_average, ConstModuleRef given_model, double decay) {
  const torch::nn::Module &average = given_average.for_operation("ema_update_"),
                          &model = given_model.for_operation("ema_update_");
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
