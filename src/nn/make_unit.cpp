#include "nn/make_unit.h"

#include <algorithm>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "base/check.h"
#include "base/format.h"
#include "base/log.h"
#include "engine/agreement.h"
#include "engine/internal_scope.h"
#include "engine/recorded_storage.h"
#include "engine/recording.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/same_values.h"
#include "nn/slots.h"

namespace fsdp::nn {

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

// Each rank may ignore modules of its own, whose numbers others do without.
void warn_of_other_names(const Group& group, const std::string& mine, const engine::OtherText& other) {
  log::warn(
      "[FullyShardedDataParallel] rank {} and rank {} have other names for the parameters of a flat one:\n"
      "{}against\n{}They are trained as one in this order. Build the same model on every rank, unless the ranks ignore "
      "different modules",
      group.rank(),
      other.rank,
      mine,
      other.text);
}

// How its elements follow one another: said where that is not as usual.
std::string order_of(const at::Tensor& tensor) {
  std::ostringstream text;
  const bool strided = tensor.layout() == c10::kStrided; // else it is refused
  if (strided && !tensor.is_contiguous() && tensor.is_non_overlapping_and_dense()) {
    text << ", in memory";
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      text << " " << (tensor.size(dim) > 1 ? tensor.stride(dim) : 0);
    }
  }
  return text.str();
}

/// What a rank says of a unit that it makes.
struct Texts {
  std::string options; // of ranks that gather together
  std::string reduction; // of those that replicas have to have in common
  std::string params, values, names;
};

Texts texts_of(const engine::UnitSpec& spec, bool syncs_values) {
  const auto& precision = spec.precision;
  const std::string syncs = syncs_values ? ", sync_module_states\n" : "\n";
  std::ostringstream options, reduction, params, names;
  options << "mesh of " << c10::IntArrayRef(spec.mesh.sizes()) << ", param_dtype " << text_of(precision.param_dtype)
          << ", reduce_dtype " << text_of(precision.reduce_dtype) << ", reshard_after_forward "
          << text_of(spec.reshard_after_forward) << ", " << (spec.offload ? "offloaded" : "not offloaded") << syncs;
  reduction << "reduced in " << text_of(precision.reduce_dtype ? precision.reduce_dtype : precision.param_dtype)
            << syncs;
  for (const auto& param : spec.params) {
    (spec.flat ? names : params) << param.name << (spec.flat ? "\n" : " ");
    params << param.tensor.sizes() << " " << param.tensor.scalar_type() << " along dimension " << param.placement.dim
           << order_of(param.tensor) << (param.tensor.requires_grad() ? "" : ", frozen") << "\n";
  }
  const std::string values = syncs_values ? "" : digests_of_values(spec.params);
  return {options.str(), reduction.str(), params.str(), values, names.str()};
}

// Values that differ are no error: a checkpoint may come next. Nor are the names in flat parameters, as in PyTorch.
void check_same_in(Group& group, const engine::UnitSpec& spec, const std::string& options, const Texts& mine) {
  std::vector<std::string> texts{options + mine.params, mine.values};
  if (spec.flat) {
    texts.push_back(mine.names);
  }
  const auto others = engine::find_other_texts(group, texts, Label{"fully_shard", spec.name});
  const auto& other = others[0];
  FSDP_CHECK(
      !other,
      "[fully_shard] rank {} and rank {} shard differently:\n{}against\n{}Build the same model on every rank, and give "
      "the same options",
      group.rank(),
      other->rank,
      texts[0],
      other->text);
  if (others[1]) {
    warn_of_other_values(group, spec.params, mine.values, *others[1]);
  }
  if (spec.flat && others[2]) {
    warn_of_other_names(group, mine.names, *others[2]);
  }
}

// Ranks that shard different models, or in another way, would wait for one another, or mix up their parameters.
void check_same_everywhere(const engine::UnitSpec& spec, bool syncs_values) {
  const Texts mine = texts_of(spec, syncs_values);
  const int shards = spec.mesh.ndim() - 1;
  for (int dim = shards; dim >= 0; --dim) {
    check_same_in(*spec.mesh.group(dim), spec, dim == shards ? mine.options : mine.reduction, mine);
  }
}

/// The parameters that a call of `fully_shard` makes a unit of, and where they stand.
struct Found {
  std::vector<Slot> slots;
  std::vector<std::optional<size_t>> indices; // of the slots' parameters among `params`; unset if in units already
  std::vector<engine::ParamSpec> params;
};

std::optional<ShardPlacement> placement_of(const FullyShardOptions& options, const Slot& slot) {
  return options.shard_placement_fn ? options.shard_placement_fn(slot.tensor, slot.path) : std::nullopt;
}

void check_one_mesh(const Param& param, const Slot& slot, const std::optional<ShardPlacement>& placement) {
  FSDP_CHECK(
      !placement || !placement->mesh || *placement->mesh == param.bucket().mesh(),
      "[fully_shard] '{}' is the same parameter as '{}', which already lies on {}: a parameter cannot be in two "
      "meshes, and {} was asked for. Give both names the same mesh, or none",
      slot.path,
      param.name(),
      param.bucket().mesh().str(),
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
      check_not_left(slot.tensor, slot.path, "fully_shard");
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

void check_hidable(const Found& found, const std::optional<FlatCut>& flat) {
  for (const auto& slot : found.slots) {
    FSDP_CHECK(
        !flat || !flat->shown_as_one || slot.replace,
        "[FullyShardedDataParallel] '{}' belongs to a module that reads its registered parameters, as ParameterList "
        "does, so that no flat parameter can stand in its place: set use_orig_params = true",
        slot.path);
  }
}

// From now on the registered parameters are the shards, or there is one flat shard in their stead.
void register_shards(const Found& found, const Unit& unit) {
  for (size_t i = 0; i < found.slots.size(); ++i) {
    const Slot& slot = found.slots[i];
    Param* param = found.indices[i] ? unit.params()[*found.indices[i]].get() : engine::param_of(slot.tensor);
    if (param == nullptr) {
      continue;
    }
    if (slot.replace) {
      slot.replace(shown_in_place_of(*param));
    } else {
      param->note_handle_is_registered();
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
    Found& found,
    const std::vector<ModuleView>& modules,
    const FullyShardOptions& options,
    const std::string& name,
    const std::optional<FlatCut>& flat) {
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
  spec.flat = flat;
  check_hidable(found, flat);
  check_same_everywhere(spec, options.sync_module_states);
  if (options.sync_module_states) {
    for (const auto& param : spec.params) {
      engine::materialize(param.tensor);
    }
    std::vector<at::Tensor> buffers;
    for (const auto& module : modules) {
      buffers.insert(buffers.end(), module.buffers.begin(), module.buffers.end());
    }
    broadcast_values(spec, buffers);
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
}

// What was made in `deferred_init`: parameters get their values when they are cut, all else here.
void materialize_what_is_not_cut(const Found& found, const std::vector<ModuleView>& modules) {
  for (const auto& param : found.params) {
    engine::check_can_materialize(param.tensor);
  }
  for (size_t i = 0; i < found.slots.size(); ++i) {
    if (!found.indices[i]) {
      engine::materialize(found.slots[i].tensor);
    }
  }
  for (const auto& module : modules) {
    for (const auto& buffer : module.buffers) {
      engine::materialize(buffer);
    }
  }
}

void move_buffers(const std::vector<at::Tensor>& buffers, c10::Device device, const std::vector<at::Tensor>& ignored) {
  engine::InternalScope scope;
  const auto stays = [&](const at::Tensor& buffer) {
    return std::any_of(ignored.begin(), ignored.end(), [&](const auto& each) { return each.is_same(buffer); });
  };
  for (const auto& buffer : buffers) {
    if (buffer.defined() && !buffer.is_meta() && buffer.device() != device && !stays(buffer)) {
      buffer.set_data(buffer.to(device));
    }
  }
}
} // namespace

std::shared_ptr<Unit> make_unit(
    const std::vector<ModuleView>& modules, const FullyShardOptions& options, const std::optional<FlatCut>& flat) {
  std::vector<Slot> slots;
  std::vector<std::string> names;
  for (const auto& module : modules) {
    names.push_back(module.name);
    slots.insert(slots.end(), module.slots.begin(), module.slots.end());
  }
  const engine::Recording::Pause pause;
  Found found = find_parameters(std::move(slots), options);
  materialize_what_is_not_cut(found, modules);
  auto unit = make_unit(found, modules, options, join(names), flat);
  name_parameters(found.slots);
  register_shards(found, *unit);
  for (const auto& module : modules) {
    move_buffers(module.buffers, unit->device(), options.ignored_params);
    if (options.sync_module_states) {
      note_sent(module.buffers);
    }
  }
  unit->set_name(modules.size() == 1 ? "" : join(names));
  adopt_units_below(modules, unit);
  unit->runtime().expect_first_values("fully_shard");
  return unit;
}

} // namespace fsdp::nn
