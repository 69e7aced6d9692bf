#include <fsdp/summon.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <fsdp/front_end.h>
#include <fsdp/sharded_tensor.h>

#include "base/check.h"
#include "base/log.h"
#include "engine/at_work.h"
#include "engine/flat_bucket.h"
#include "engine/shown_wholes.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/registry.h"
#include "nn/slots.h"
#include "nn/strangers.h"

namespace fsdp {

using engine::Param;
using engine::Unit;

namespace {

// -1 if nobody counts.
int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? -1 : tensor._version();
}

} // namespace

/// What has to be undone: which whole tensor stands in which slot, and for which parameter.
struct SummonedParams::Impl {
  struct Whole {
    at::Tensor tensor;
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl(); ///< as it was shown first
    int64_t version = version_of(tensor);
    bool trainable = tensor.requires_grad();
    bool in_a_slot = false; ///< others of its unit are not
    bool with_gradient = false;

    bool has_changed() const {
      const bool known = version >= 0 && tensor.storage().unsafeGetStorageImpl() == storage;
      return !known || version_of(tensor) != version;
    }
  };
  struct Replaced {
    Slot slot;
    Param* param; ///< null: a flat shard, which nothing replaces
  };

  SummonOptions options;
  std::vector<std::shared_ptr<Unit>> all_units; ///< also where nothing is shown
  std::vector<std::shared_ptr<Unit>> units; ///< that are shown
  std::unordered_map<Param*, Whole> wholes;
  std::vector<Replaced> replaced;

  bool visible = true; ///< on this rank
  bool failed = false; ///< to begin

  void hold(const std::shared_ptr<Unit>& unit);
  void gather_gradients(const Unit& unit);
  void show(const std::vector<Slot>& slots);
  bool shows(const engine::FlatShard& flat) const {
    return wholes.count(flat.bucket().params().front()) > 0;
  }
  void restore();
  void give_back(Unit& unit);
  static void write_back(Param& param, const Whole& shown);
  static void follow_requires_grad(Param& param, const Whole& shown);
};

namespace {

/// The units of a module and of those below, and those of modules above that have parameters there.
std::vector<FSDPModule> units_around(torch::nn::Module& module) {
  std::vector<FSDPModule> found;
  for (const auto& [path, each] : nn::modules_of(module)) {
    if (const auto unit = nn::registry::find(*each)) {
      found.emplace_back(unit);
    }
  }
  for (const auto& slot : nn::slots_of(module)) {
    const Param* param = engine::param_of(slot.tensor);
    if (auto unit = param != nullptr ? param->unit().shared_from_this() : engine::shown_wholes::unit_of(slot.tensor)) {
      found.emplace_back(std::move(unit));
    }
  }
  return found;
}

bool waits(const std::unique_ptr<Param>& param) {
  return param->gradient.defined();
}

bool is_first_rank(const Unit& unit) {
  return unit.mesh().coordinate(unit.mesh().ndim() - 1) == 0;
}

} // namespace

void SummonedParams::Impl::hold(const std::shared_ptr<Unit>& unit) {
  unit->before_shard_read(); // what an outer guard has written, too
  const engine::AtWork at_work(unit->runtime());
  FSDP_CHECK(
      !unit->runtime().backward_runs(),
      "[summon_full_params] was called in a backward, which computes with the parameters of '{}': call it before or "
      "after",
      unit->display_name());
  unit->unshard_as_stored(options.offload_to_cpu ? c10::Device(c10::kCPU) : unit->device(), visible);
  all_units.push_back(unit);
  ++unit->summoned;
  unit->summoned_by_one += options.rank0_only ? 1 : 0;
  unit->summoned_to_read += options.writeback ? 0 : 1;
  if (!visible) {
    return;
  }
  units.push_back(unit);
  ++unit->held;
  unit->follow_requires_grad();
  for (const auto& param : unit->params()) {
    // An alias: users may give their tensor other data. A copy, where another guard shows it on a device.
    const at::Tensor copy = param->bucket().private_copy(*param);
    const at::Tensor whole = options.offload_to_cpu ? copy.to(c10::kCPU) : copy;
    param->keep_for_holders(); // of a recurrent module, whose `to()` may come
    const at::Tensor shown = whole.is_same(copy) ? copy.alias() : whole;
    wholes.insert_or_assign(param.get(), Whole{shown.set_requires_grad(param->trainable())});
    engine::shown_wholes::add(shown, *param);
  }
}

// By all ranks, though some do not show them.
void SummonedParams::Impl::gather_gradients(const Unit& unit) {
  FSDP_CHECK(
      !unit.policy.shows_waiting_gradients || std::none_of(unit.params().begin(), unit.params().end(), waits),
      "[summon_full_params] with_grads shows reduced gradients, and those of '{}' wait, in no_sync, for a backward "
      "that reduces them: call it after that",
      unit.display_name());
  for (const auto& param : unit.params()) {
    const at::Tensor gradient = sharded(param->shard()).full_grad();
    if (auto found = wholes.find(param.get()); found != wholes.end() && gradient.defined()) {
      const engine::InternalScope scope;
      const at::Tensor& whole = found->second.tensor;
      found->second.with_gradient = true;
      whole.mutable_grad() = gradient.to(whole.options().requires_grad(false));
    }
  }
}

void SummonedParams::Impl::show(const std::vector<Slot>& slots) {
  for (const auto& slot : slots) {
    Param* param = engine::param_of(slot.tensor);
    if (auto found = wholes.find(param); found != wholes.end() && slot.replace) {
      slot.replace(found->second.tensor);
      found->second.in_a_slot = true;
      replaced.push_back({slot, param});
    } else if (const auto* flat = engine::flat_shard_of(slot.tensor); flat != nullptr && shows(*flat)) {
      slot.replace({});
      replaced.push_back({slot, nullptr});
    }
  }
}

// What lies in the private copy reaches the shard when the unit is resharded. A graph that has saved the parameter is
// told of writes as it would be where nothing is sharded: not of those through `data`.
void SummonedParams::Impl::write_back(Param& param, const Whole& shown) {
  const at::Tensor& whole = shown.tensor;
  FSDP_CHECK(
      whole.sizes() == param.layout().sizes(),
      "[summon_full_params] '{}' has shape {} at the end, and cannot become shards of a parameter of shape {}. Write "
      "into it: p.copy_(values). What was written to its unit is lost",
      param.name(),
      whole.sizes(),
      c10::IntArrayRef(param.layout().sizes()));
  const at::Tensor copy = param.bucket().private_copy(param);
  const bool shares_memory = whole.is_alias_of(copy);
  if (!shares_memory || whole.strides() != copy.strides()) {
    copy.copy_(shares_memory ? whole.clone() : whole);
  }
  if (shown.has_changed()) {
    param.values_change();
  }
  if (auto gradient = param.shard_gradient(); shown.in_a_slot && shown.with_gradient && gradient.defined()) {
    whole.grad().defined() ? gradient.copy_(param.piece_of(whole.grad())) : gradient.zero_(); // dropped in the guard
  }
}

// Users have frozen or thawed what is shown; of a flat shard, not all.
void SummonedParams::Impl::follow_requires_grad(Param& param, const Whole& shown) {
  const bool wanted = shown.tensor.requires_grad();
  if (shown.tensor.is_leaf() && wanted != shown.trainable && param.bucket().flat_shard() == nullptr) {
    param.train(wanted);
  }
}

void SummonedParams::Impl::restore() {
  engine::InternalScope scope;
  for (const auto& [param, whole] : wholes) {
    engine::shown_wholes::remove(whole.tensor);
  }
  for (auto& [slot, param] : replaced) {
    slot.replace(param != nullptr ? nn::shown_in_place_of(*param) : slot.tensor);
  }
  for (const auto& unit : all_units) { // reset_iter_state lets go of everything
    unit->summoned = std::max(0, unit->summoned - 1);
    unit->summoned_by_one = std::max(0, unit->summoned_by_one - (options.rank0_only ? 1 : 0));
    unit->summoned_to_read = std::max(0, unit->summoned_to_read - (options.writeback ? 0 : 1));
  }
  std::exception_ptr error; // of the first unit that fails; the others are given back all the same
  for (auto& unit : units) {
    try {
      give_back(*unit);
    } catch (...) {
      error = error ? error : std::current_exception();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

void SummonedParams::Impl::give_back(Unit& unit) {
  auto guard = unit.runtime().lock();
  for (const auto& param : unit.params()) {
    param->remind_holders();
    if (const auto found = wholes.find(param.get());
        found != wholes.end() && !options.rank0_only) { // alike on all ranks
      follow_requires_grad(*param, found->second);
    }
  }
  unit.held = std::max(0, unit.held - 1); // reset_iter_state lets go of everything
  const bool writes = options.writeback && !failed && unit.is_private();
  try {
    for (const auto& param : unit.params()) {
      if (auto found = wholes.find(param.get()); writes && found != wholes.end()) {
        write_back(*param, found->second);
      }
    }
  } catch (...) {
    unit.discard_private();
    throw;
  }
  if (unit.held == 0) {
    unit.is_private() && !writes ? unit.discard_private() : unit.reshard();
  } else if (writes && unit.summoned_to_read > 0) { // which may end last, and drops what is written
    for (const auto& param : unit.params()) {
      unit.write_back(*param);
    }
  }
}

SummonedParams::SummonedParams(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SummonedParams::SummonedParams(SummonedParams&&) noexcept = default;

void SummonedParams::end() {
  if (const auto impl = std::move(impl_)) {
    impl->restore();
  }
}

SummonedParams::~SummonedParams() {
  try {
    end();
  } catch (const std::exception& error) {
    log::error("[summon_full_params] the parameters could not be sharded again: {}", error.what());
  }
}

void check_may_summon(const std::vector<FSDPModule>& modules, const SummonOptions& options) {
  for (const auto& module : modules) {
    const Unit& unit = *module.unit();
    FSDP_CHECK(
        unit.summoned_by_one == 0,
        "[summon_full_params] the parameters of '{}' are already shown on one rank, by a guard with rank0_only: end "
        "that guard first",
        unit.display_name());
    FSDP_CHECK(
        !options.writeback || unit.summoned_to_read == 0,
        "[summon_full_params] the parameters of '{}' are already shown by a guard with writeback = false, which drops "
        "what is written within it: end that guard first, or read only, with writeback = false here too",
        unit.display_name());
  }
}

bool is_summoned(const FSDPModule& module) {
  return module.unit()->summoned > 0;
}

SummonedParams summon_full_params(ModuleRef given, const SummonOptions& options) {
  torch::nn::Module& module = given.for_operation("summon_full_params");
  nn::strangers::check_none(module, "summon_full_params");
  const auto unit = nn::registry::find(module);
  const auto own = unit ? std::optional<FSDPModule>(unit) : std::nullopt;
  if (!options.recurse && !own) {
    return summon_full_params(std::vector<Slot>(), nullptr, options);
  }
  check_may_summon(options.recurse ? units_around(module) : std::vector{*own}, options);
  nn::settle_replaced_shards(module);
  auto slots = nn::slots_of(module);
  const auto flat_slots = nn::flat_slots_of(module);
  slots.insert(slots.end(), flat_slots.begin(), flat_slots.end());
  return summon_full_params(slots, options.recurse ? nullptr : &*own, options);
}

SummonedParams summon_full_params(
    const std::vector<Slot>& slots, const FSDPModule* only, const SummonOptions& options) {
  FSDP_CHECK(
      !(options.rank0_only && options.writeback),
      "[summon_full_params] with rank0_only the other ranks have nothing to write back: set writeback = false");
  auto impl = std::make_unique<SummonedParams::Impl>();
  impl->options = options;
  auto units = nn::units_of(slots);
  std::erase_if(units, [&](const auto& unit) { return only != nullptr && unit != only->unit(); });
  impl->visible = !options.rank0_only || units.empty() || is_first_rank(*units[0]);
  try {
    for (const auto& unit : units) {
      impl->hold(unit);
      if (options.with_grads) {
        impl->gather_gradients(*unit);
      }
    }
    impl->show(slots);
  } catch (...) {
    impl->failed = true;
    impl->restore();
    throw;
  }
  return SummonedParams(std::move(impl));
}

} // namespace fsdp
