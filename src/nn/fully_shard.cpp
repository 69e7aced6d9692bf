#include <fsdp/fully_shard.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <fsdp/front_end.h>
#include <fsdp/init.h>

#include "base/check.h"
#include "base/format.h"
#include "engine/agreement.h"
#include "engine/internal_scope.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/recurrent.h"
#include "nn/registry.h"
#include "nn/same_values.h"
#include "nn/slots.h"
#include "nn/strangers.h"

namespace fsdp {

namespace {

using engine::Param;
using engine::Unit;

void check_device(c10::Device device) {
  FSDP_CHECK(
      c10::impl::hasDeviceGuardImpl(device.type()) && device.type() != c10::kMeta,
      "[fully_shard] the mesh is on '{}', which this LibTorch has no support for: build the mesh on \"cpu\" or on a "
      "device that torch::Device can use here",
      device);
  FSDP_CHECK(
      device.type() != c10::kPrivateUse1,
      "[fully_shard] the mesh is on '{}', a device that joins LibTorch from outside (PrivateUse1): "
      "at::Tensor::set_data does not take tensors of it, so its parameters cannot be sharded in place",
      device);
}

void check_mesh(const Mesh& mesh) {
  FSDP_CHECK(
      mesh.ndim() == 1 || mesh.ndim() == 2,
      "[fully_shard] a mesh of one dimension (shard) or two (replicate, shard) is needed, not {}: slice it, as in "
      "mesh[\"shard\"]",
      mesh.str());
  FSDP_CHECK(
      mesh.ndim() == 1 || !mesh.names().empty(),
      "[fully_shard] the two dimensions of a hybrid mesh need names: init_device_mesh(device, {replicas, shards}, "
      "{\"replicate\", \"shard\"})");
  check_device(mesh.device());
}

void check_reshard(const FullyShardOptions& options, const Mesh& mesh) {
  const auto ranks = options.reshard_after_forward.ranks();
  const int64_t shards = mesh.sizes().back();
  FSDP_CHECK(
      !ranks || (*ranks >= 1 && *ranks <= shards && shards % *ranks == 0),
      "[fully_shard] reshard_after_forward = {} must divide the {} ranks of the shard dimension of {}",
      *ranks,
      shards,
      mesh.str());
}

std::string text_of(std::optional<c10::ScalarType> dtype) {
  return dtype ? c10::toString(*dtype) : "unset";
}

std::string text_of(const ReshardAfterForward& policy) {
  const auto reshard = policy.reshard();
  return policy.ranks() ? std::to_string(*policy.ranks()) : !reshard ? "unset" : *reshard ? "true" : "false";
}

// Ranks that shard different models, or in another way, would wait for one another, or mix up their parameters. Values
// that differ are no error: a checkpoint may come next.
void check_same_everywhere(const engine::UnitSpec& spec, bool syncs_values) {
  Group& group = *spec.mesh.group(spec.mesh.ndim() - 1);
  std::ostringstream mine;
  mine << "mesh of " << c10::IntArrayRef(spec.mesh.sizes()) << ", param_dtype " << text_of(spec.precision.param_dtype)
       << ", reduce_dtype " << text_of(spec.precision.reduce_dtype) << ", reshard_after_forward "
       << text_of(spec.reshard_after_forward) << ", " << (spec.offload ? "offloaded" : "not offloaded")
       << (syncs_values ? ", sync_module_states" : "") << "\n";
  for (const auto& param : spec.params) {
    mine << param.name << " " << param.tensor.sizes() << " " << param.tensor.scalar_type() << " along dimension "
         << param.placement.dim << (param.tensor.requires_grad() ? "" : ", frozen") << "\n";
  }
  const std::string values = syncs_values ? "" : nn::digests_of_values(spec.params);
  const Label label{"fully_shard", spec.name};
  const auto others = engine::find_other_texts(group, {mine.str(), values}, label);
  const auto& other = others[0];
  FSDP_CHECK(
      !other,
      "[fully_shard] rank {} and rank {} shard differently:\n{}against\n{}Build the same model on every rank, and give "
      "the same options",
      group.rank(),
      other->rank,
      mine.str(),
      other->text);
  if (others[1]) {
    nn::warn_of_other_values(group, spec.params, values, *others[1]);
  }
  if (spec.mesh.ndim() == 2 && !syncs_values) {
    Group& replicas = *spec.mesh.group(0);
    if (const auto differs = engine::find_other_text(replicas, values, label)) {
      nn::warn_of_other_values(replicas, spec.params, values, *differs);
    }
  }
}

/// The parameters that a call of `fully_shard` makes a unit of, and where they stand.
struct Found {
  std::vector<Slot> slots;
  std::vector<std::optional<size_t>> indices; // of the slots' parameters among `params`; unset if in units already
  std::vector<engine::ParamSpec> params;
};

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

std::optional<ShardPlacement> placement_of(const FullyShardOptions& options, const Slot& slot) {
  return options.shard_placement_fn ? options.shard_placement_fn(slot.tensor, slot.path) : std::nullopt;
}

void check_one_mesh(const Param& param, const Slot& slot, const std::optional<ShardPlacement>& placement) {
  FSDP_CHECK(
      !placement || !placement->mesh || *placement->mesh == param.bucket().options().mesh,
      "[fully_shard] '{}' is the same parameter as '{}', which already lies on {}: a parameter cannot be in two "
      "meshes, and {} was asked for. Give both names the same mesh, or none",
      slot.path,
      param.name(),
      param.bucket().options().mesh.str(),
      placement->mesh->str());
}

Found find_parameters(std::vector<Slot> slots, const FullyShardOptions& options) {
  Found found{std::move(slots), {}, {}};
  std::unordered_map<const c10::TensorImpl*, std::optional<size_t>> seen;
  for (const auto& tensor : options.ignored_params) {
    seen[tensor.unsafeGetTensorImpl()] = std::nullopt;
  }
  for (const auto& slot : found.slots) {
    auto& index = found.indices.emplace_back();
    if (const Param* param = engine::param_of(slot.tensor)) {
      if (engine::is_handle(slot.tensor)) {
        check_one_mesh(*param, slot, placement_of(options, slot));
      }
      continue;
    }
    const auto [entry, is_new] = seen.try_emplace(slot.tensor.unsafeGetTensorImpl(), found.params.size());
    index = entry->second;
    if (is_new) {
      found.params.push_back({slot.path, slot.tensor, placement_of(options, slot).value_or(ShardPlacement{})});
    }
  }
  return found;
}

void check_placement_meshes(const Found& found, const Mesh& mesh) {
  for (const auto& param : found.params) {
    if (param.placement.mesh) {
      check_mesh(*param.placement.mesh);
      FSDP_CHECK(
          param.placement.mesh->device() == mesh.device(),
          "[fully_shard] '{}' is to lie on {}, its unit on {}: build both meshes for one kind of device",
          param.name,
          param.placement.mesh->str(),
          mesh.str());
    }
  }
}

// From now on the registered parameters are the shards.
void register_shards(const Found& found, const Unit& unit) {
  for (size_t i = 0; i < found.slots.size(); ++i) {
    const Slot& slot = found.slots[i];
    const Param* param = found.indices[i] ? unit.params()[*found.indices[i]].get() : engine::param_of(slot.tensor);
    if (param != nullptr && slot.replace) {
      slot.replace(param->shard());
    }
  }
}

// The outermost module's names are the ones that users know.
void name_parameters(const std::vector<Slot>& slots) {
  std::unordered_set<Param*> named;
  for (const auto& slot : slots) {
    Param* param = engine::param_of(slot.tensor);
    if (param != nullptr && named.insert(param).second) {
      param->set_name(slot.path);
    }
  }
}

std::shared_ptr<Unit> make_unit(
    Found& found, const std::vector<ModuleView>& modules, const FullyShardOptions& options, const std::string& name) {
  Mesh mesh = options.mesh ? *options.mesh : default_mesh();
  check_mesh(mesh);
  check_reshard(options, mesh);
  check_placement_meshes(found, mesh);
  const auto* offload = std::get_if<CPUOffloadPolicy>(&options.offload_policy);
  engine::UnitSpec spec{
      name,
      found.params,
      mesh,
      mesh.device(),
      options.mp_policy,
      offload != nullptr ? std::optional(*offload) : std::nullopt,
      options.reshard_after_forward};
  check_same_everywhere(spec, options.sync_module_states);
  if (options.sync_module_states) {
    std::vector<at::Tensor> buffers;
    for (const auto& module : modules) {
      buffers.insert(buffers.end(), module.buffers.begin(), module.buffers.end());
    }
    nn::broadcast_values(spec, buffers);
  }
  found.params.clear();
  return Unit::create(std::move(spec));
}

/// The units of the modules below, which have not been told yet what they are called from here, nor who is above them.
void adopt_units_below(const std::vector<ModuleView>& modules, const std::shared_ptr<Unit>& unit) {
  std::unordered_map<Unit*, std::vector<std::string>> paths;
  std::vector<std::shared_ptr<Unit>> order;
  for (const auto& module : modules) {
    for (const auto& [path, sharded] : module.below) {
      const auto& below = sharded.unit();
      if (below == unit) {
        continue;
      }
      auto& names = paths[below.get()];
      if (names.empty()) {
        order.push_back(below);
      }
      names.push_back(path);
    }
  }
  for (auto& below : order) {
    below->set_name(join(paths[below.get()]));
    if (below->parent() == nullptr) {
      below->set_parent(unit.get());
    }
    if (below->shared_runtime() != unit->shared_runtime()) {
      unit->runtime().adopt(below->runtime());
    }
  }
  if (unit->params().empty()) {
    unit->runtime().keep(unit);
  }
}

void move_buffers(const std::vector<at::Tensor>& buffers, c10::Device device) {
  engine::InternalScope scope;
  for (const auto& buffer : buffers) {
    if (buffer.defined() && !buffer.is_meta() && buffer.device() != device) {
      buffer.set_data(buffer.to(device));
    }
  }
}

ModuleView view_of(torch::nn::Module& module) {
  nn::settle_replaced_shards(module);
  ModuleView view{module.name(), nn::slots_of(module), {}, module.buffers()};
  for (const auto& [path, each] : nn::modules_of(module)) {
    if (auto unit = each != &module ? nn::registry::find(*each) : nullptr) {
      FSDP_CHECK(
          unit->held == 0,
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

FSDPModule fully_shard(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& options) {
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
  check_any(any, modules[0]->name());
  check_not_taken(views, options);
  auto sharded = fully_shard(views, options);
  for (auto* module : modules) {
    nn::strangers::note_ignored(sharded.unit(), options.ignored_params);
    nn::remember_handles_of_recurrent(*module, *sharded.unit());
    nn::registry::enter(*module, sharded.unit());
  }
  return sharded;
}

FSDPModule fully_shard(const std::vector<ModuleView>& modules, const FullyShardOptions& options) {
  std::vector<Slot> slots;
  std::vector<std::string> names;
  for (const auto& module : modules) {
    names.push_back(module.name);
    slots.insert(slots.end(), module.slots.begin(), module.slots.end());
  }
  Found found = find_parameters(std::move(slots), options);
  auto unit = make_unit(found, modules, options, join(names));
  name_parameters(found.slots);
  register_shards(found, *unit);
  for (const auto& module : modules) {
    move_buffers(module.buffers, unit->device());
  }
  unit->set_name(modules.size() == 1 ? "" : join(names));
  adopt_units_below(modules, unit);
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
