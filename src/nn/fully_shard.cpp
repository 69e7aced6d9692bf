#include <fsdp/fully_shard.h>

#include <algorithm>

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <fsdp/front_end.h>

#include "base/check.h"
#include "base/format.h"
#include "engine/bucket.h"
#include "engine/flat_shard.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/hidden_parameters.h"
#include "nn/make_unit.h"
#include "nn/recurrent.h"
#include "nn/registry.h"
#include "nn/slots.h"

namespace fsdp {

namespace {

using engine::Param;
using engine::Unit;

void check_any(bool any, const std::string& name) {
  FSDP_CHECK(
      any,
      "[fully_shard] the module '{}' has no parameters, nor have the modules below it: there is nothing to shard, so "
      "leave it out, or register what it reads with register_parameter",
      name);
}

bool is_below(const Unit& unit, const std::vector<ModuleView>& modules) {
  return std::any_of(modules.begin(), modules.end(), [&](const auto& module) {
    return std::any_of(module.below.begin(), module.below.end(), [&](const auto& below) {
      return below.second.unit().get() == &unit;
    });
  });
}

// All parameters may be those of units below, or of modules elsewhere that share them. But where a call on a module
// above has put its shards, this one would have no effect.
void check_not_taken(const std::vector<ModuleView>& modules, const FullyShardOptions& options) {
  const Slot* taken = nullptr;
  for (const auto& module : modules) {
    for (const auto& slot : module.slots) {
      const Param* param = engine::param_of(slot.tensor);
      const auto is_slot = [&](const at::Tensor& tensor) { return tensor.is_same(slot.tensor); };
      if (param == nullptr && std::none_of(options.ignored_params.begin(), options.ignored_params.end(), is_slot)) {
        return;
      }
      const bool put_there = !slot.replace || !engine::is_handle(slot.tensor);
      if (param != nullptr && put_there && !is_below(param->unit(), modules)) {
        taken = taken != nullptr ? taken : &slot;
      }
    }
  }
  if (taken != nullptr) {
    const Param& param = *engine::param_of(taken->tensor);
    fail(
        "[fully_shard] nothing is left to shard in the module '{}': an earlier call, on a module above it, has taken "
        "its '{}' into the unit '{}' (where it is '{}'). Call fully_shard on children first, then on their parents",
        modules[0].name,
        taken->path,
        param.unit().display_name(),
        param.name());
  }
}

void check_materialized(const std::vector<Slot>& slots) {
  std::vector<std::string> on_meta;
  for (const auto& slot : slots) {
    if (slot.tensor.is_meta()) {
      on_meta.push_back(slot.path);
    }
  }
  FSDP_CHECK(
      on_meta.empty(),
      "[fully_shard] parameters have to be materialized from the meta device first, but these were not: {}. Build the "
      "model on \"cpu\", or give them memory and values before",
      join(on_meta));
}

ModuleView view_of(torch::nn::Module& module) {
  nn::settle_replaced_shards(module);
  ModuleView view{module.name(), nn::slots_of(module), {}, module.buffers()};
  for (const auto& [path, each] : nn::modules_of(module)) {
    if (auto unit = each != &module ? nn::registry::find(*each) : nullptr) {
      FSDP_CHECK(
          unit->summoned == 0,
          "[fully_shard] was called while parameters of '{}', below it, are shown whole: call it after the guard of "
          "summon_full_params has ended",
          path);
      view.below.emplace_back(path, FSDPModule(std::move(unit)));
    }
  }
  return view;
}

// A TorchScript module is a value, of which there may be many: its units are known by its parameters.
ModuleView view_of(const torch::jit::Module& module) {
  const std::string name = module.type()->name() ? module.type()->name()->name() : "TorchScript module";
  ModuleView view{name, nn::slots_of(module), {}, {}};
  for (const auto& buffer : module.buffers()) {
    view.buffers.push_back(buffer);
  }
  for (const auto& slot : view.slots) {
    if (const Param* param = engine::param_of(slot.tensor)) {
      FSDP_CHECK(
          param->name() != slot.path,
          "[fully_shard] was called twice on the same TorchScript module: call it once, children before parents");
      if (param->name().ends_with("." + slot.path)) {
        continue; // of a module above
      }
      const auto path = slot.path.substr(0, slot.path.size() - std::min(slot.path.size(), param->name().size() + 1));
      const auto unit = param->unit().shared_from_this();
      const bool known = std::any_of(view.below.begin(), view.below.end(), [&](const auto& below) {
        return below.first == path && below.second.unit() == unit;
      });
      if (!known) {
        view.below.emplace_back(path, FSDPModule(unit));
      }
    }
  }
  return view;
}

/// Where a module had registered a parameter before it was sharded.
struct Place {
  torch::nn::Module* module;
  std::string name;
  at::Tensor parameter;
};

std::vector<Place> places_of(const std::vector<torch::nn::Module*>& modules) {
  std::vector<Place> places;
  for (auto* module : modules) {
    for (const auto& [path, each] : nn::modules_of(*module)) {
      for (const auto& item : nn::registered_parameters(*each)) {
        places.push_back({each, item.key(), item.value()});
      }
    }
  }
  return places;
}

// In the first of the unit's modules.
void show_flat_shards(torch::nn::Module& module, const Unit& unit, const std::vector<Place>& places) {
  for (const auto& place : places) {
    Param* param = engine::param_of(place.parameter);
    if (param != nullptr && param->bucket().flat_shard() != nullptr) {
      nn::hidden_parameters::enter(*place.module, place.name, *param);
    }
  }
  for (const auto& bucket : unit.buckets()) {
    if (const auto* flat = bucket->flat_shard()) {
      nn::registered_parameters(module).insert(nn::hidden_parameters::kFlatName, flat->tensor());
    }
  }
}

} // namespace

FSDPModule fully_shard(ModuleRef module, const FullyShardOptions& options) {
  return fully_shard(std::vector<torch::nn::Module*>{&module.for_operation("fully_shard")}, options);
}

FSDPModule fully_shard(std::initializer_list<ModuleRef> modules, const FullyShardOptions& options) {
  std::vector<torch::nn::Module*> pointers;
  for (const auto& module : modules) {
    pointers.push_back(&module.for_operation("fully_shard"));
  }
  return fully_shard(pointers, options);
}

namespace {

std::shared_ptr<Unit> shard_modules(
    const std::vector<torch::nn::Module*>& modules,
    const FullyShardOptions& options,
    const std::optional<FlatCut>& flat) {
  FSDP_CHECK(!modules.empty(), "[fully_shard] the list of modules is empty: give at least one module");
  std::vector<ModuleView> views;
  for (auto* module : modules) {
    FSDP_CHECK(module != nullptr, "[fully_shard] one of the modules is null: construct it before");
    FSDP_CHECK(
        nn::registry::find(*module) == nullptr,
        "[fully_shard] was called twice on the same module ({}): call it once, children before parents",
        module->name());
    views.push_back(view_of(*module));
  }
  const bool any = std::any_of(views.begin(), views.end(), [](const auto& view) { return !view.slots.empty(); });
  check_any(any || flat, modules[0]->name());
  check_not_taken(views, options);
  const auto places = places_of(modules);
  auto unit = nn::make_unit(views, options, flat);
  show_flat_shards(*modules[0], *unit, places);
  return unit;
}

} // namespace

std::shared_ptr<Unit> nn::make_unit(
    const std::vector<torch::nn::Module*>& modules,
    const FullyShardOptions& options,
    const std::optional<FlatCut>& flat) {
  auto unit = shard_modules(modules, options, flat); // what listed the handles is gone
  for (const auto& tensor : options.ignored_params) {
    unit->ignored.try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
  }
  for (auto* module : modules) {
    remember_handles_of_recurrent(*module, *unit);
    registry::enter(*module, unit);
  }
  return unit;
}

FSDPModule fully_shard(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& options) {
  return FSDPModule(nn::make_unit(modules, options));
}

FSDPModule fully_shard(
    const std::vector<ModuleView>& modules, const FullyShardOptions& options, const std::optional<FlatCut>& flat) {
  const auto unit = nn::make_unit(modules, options, flat);
  if (unit->params().empty()) { // which has no handle that would keep it
    unit->runtime().keep(unit);
  }
  return FSDPModule(unit);
}

FSDPModule fully_shard(torch::jit::Module& module, const FullyShardOptions& options) {
  const ModuleView view = view_of(module);
  check_materialized(view.slots);
  check_any(!view.slots.empty(), view.name);
  check_not_taken({view}, options);
  return fully_shard(std::vector<ModuleView>{view}, options);
}

FSDPModule as_fsdp(ModuleRef given) {
  torch::nn::Module& module = given.for_operation("as_fsdp");
  auto unit = nn::registry::find(module);
  FSDP_CHECK(unit != nullptr, "[as_fsdp] fully_shard was not called on this module ({}): call it first", module.name());
  return FSDPModule(std::move(unit));
}

bool is_fsdp(ConstModuleRef module) {
  return nn::registry::find(module.for_operation("is_fsdp")) != nullptr;
}

} // namespace fsdp