#include "nn/registry.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/flat_bucket.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"

namespace fsdp::nn::registry {

namespace {

struct Entry {
  std::weak_ptr<torch::nn::Module> module; // empty for modules on the stack
  bool shared_module;
  std::vector<std::weak_ptr<torch::nn::Module>> children; // of a module on the stack
  std::weak_ptr<engine::Unit> unit;
  std::shared_ptr<engine::Unit> kept{}; // as nothing else would

  bool alive() const {
    return !unit.expired() && !(shared_module && module.expired());
  }
};

bool has_one_of(const torch::nn::Module& module, const std::vector<std::weak_ptr<torch::nn::Module>>& children) {
  for (const auto& child : module.children()) {
    for (const auto& known : children) {
      if (known.lock() == child) {
        return true;
      }
    }
  }
  return false;
}

bool has_shard_of(const torch::nn::Module& module, const engine::Unit& unit) {
  for (const auto& parameter : module.parameters(/*recurse=*/false)) {
    const auto* flat = engine::flat_shard_of(parameter);
    const auto* param = flat != nullptr ? flat->bucket().params().front() : engine::param_of(parameter);
    if (param != nullptr && &param->unit() == &unit) {
      return true;
    }
  }
  return false;
}

// Nobody tells when a module on the stack goes, and another may come to lie there, while an optimizer keeps the shards.
// That one has other children, and other parameters. (A guard shows other tensors, while it holds the unit.)
bool is_still(const torch::nn::Module& module, const Entry& entry, const engine::Unit& unit) {
  return entry.shared_module || has_one_of(module, entry.children) || unit.held > 0 || has_shard_of(module, unit);
}

std::mutex mutex;
// Never destroyed: units that it keeps would go after what they need to go.
std::unordered_map<const torch::nn::Module*, Entry>& entries = *new std::unordered_map<const torch::nn::Module*, Entry>;

// Handles keep their unit. There may be none: it has no parameters, or no member holds what is registered
// (`head->weight = embedding->weight` before the head is sharded).
bool needs_keeper(const std::shared_ptr<engine::Unit>& unit) {
  return unit->kept || unit.use_count() == 1;
}

bool others_keep_themselves(const engine::Runtime& runtime) {
  return runtime.any_unit([](const engine::Unit& unit) { return !unit.kept; });
}

// Of units that nothing else went with when they were made.
void hand_over_to(engine::Runtime& runtime) {
  for (auto& [module, entry] : entries) {
    if (entry.kept != nullptr && &entry.kept->runtime() == &runtime) {
      runtime.keep(std::move(entry.kept));
    }
  }
}

std::vector<Entry> take_dead_ones() {
  std::vector<Entry> dead;
  std::erase_if(entries, [&](auto& item) {
    if (item.second.alive()) {
      return false;
    }
    dead.push_back(std::move(item.second));
    return true;
  });
  return dead;
}

} // namespace

void enter(torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit) {
  std::vector<Entry> dead; // go without the lock
  const std::lock_guard lock(mutex);
  dead = take_dead_ones();
  auto weak = module.weak_from_this();
  const bool shared_module = !weak.expired();
  std::vector<std::weak_ptr<torch::nn::Module>> children;
  if (!shared_module) {
    const auto owned = module.children();
    children.assign(owned.begin(), owned.end());
  }
  unit->kept = needs_keeper(unit);
  const bool goes_with_others = others_keep_themselves(unit->runtime());
  if (unit->kept && (goes_with_others || !shared_module)) {
    unit->runtime().keep(unit);
  }
  if (goes_with_others) {
    hand_over_to(unit->runtime());
  }
  const bool keeps = unit->kept && shared_module && !goes_with_others;
  entries[&module] = {std::move(weak), shared_module, std::move(children), unit, keeps ? unit : nullptr};
}

std::shared_ptr<engine::Unit> find(const torch::nn::Module& module) {
  std::lock_guard lock(mutex);
  auto found = entries.find(&module);
  if (found == entries.end() || !found->second.alive()) {
    return nullptr;
  }
  auto unit = found->second.unit.lock();
  return unit && is_still(module, found->second, *unit) ? unit : nullptr;
}

} // namespace fsdp::nn::registry
