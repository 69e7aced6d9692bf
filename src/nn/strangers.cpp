#include "nn/strangers.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#include "base/check.h"
#include "engine/flat_shard.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/registry.h"
#include "nn/slots.h"

namespace fsdp::nn::strangers {

namespace {

using Ignored = std::unordered_map<const c10::TensorImpl*, engine::WeakTensor>;
using KnownIgnored = std::shared_ptr<const Ignored>;

std::mutex mutex;
// By unit: it dies with its module, whose address may be used again.
std::map<std::weak_ptr<engine::Unit>, KnownIgnored, std::owner_less<>> ignored_by_unit;

KnownIgnored ignored_by(const std::shared_ptr<engine::Unit>& unit) {
  std::lock_guard lock(mutex);
  const auto found = ignored_by_unit.find(unit);
  return found == ignored_by_unit.end() ? nullptr : found->second;
}

bool is_stranger(const at::Tensor& parameter) {
  return parameter.defined() && parameter.requires_grad() && engine::param_of(parameter) == nullptr &&
         engine::flat_shard_of(parameter) == nullptr;
}

// Mostly there are none, and this is asked in each step: no name is put together, nothing copied.
bool has_strangers(const torch::nn::Module& module) {
  bool any = false;
  module.apply([&](const torch::nn::Module& each) {
    for (const auto& item : registered_parameters(each)) {
      any = any || is_stranger(item.value());
    }
  });
  return any;
}

bool shows_wholes(const engine::Unit& unit) {
  return unit.runtime().any_unit([](const engine::Unit& each) { return each.held > 0; });
}

class Search {
 public:
  explicit Search(const char* operation) : operation_(operation) {}

  void look_below(const torch::nn::Module& module) {
    const auto unit = registry::find(module);
    if (unit != nullptr) {
      if (shows_wholes(*unit)) {
        return;
      }
      sharded_.push_back(ignored_by(unit));
    }
    if (!sharded_.empty()) {
      for (const auto& item : registered_parameters(module)) {
        check(item.key(), item.value());
      }
    }
    for (const auto& child : module.named_children()) {
      path_.push_back(&child.key());
      look_below(*child.value());
      path_.pop_back();
    }
    if (unit != nullptr) {
      sharded_.pop_back();
    }
  }

 private:
  void check(const std::string& name, const at::Tensor& parameter) const {
    if (!is_stranger(parameter)) {
      return;
    }
    const bool ignored = std::any_of(sharded_.begin(), sharded_.end(), [&](const KnownIgnored& known) {
      return known != nullptr && known->count(parameter.unsafeGetTensorImpl()) > 0;
    });
    if (!ignored) {
      refuse(name);
    }
  }

  [[noreturn]] void refuse(const std::string& name) const {
    std::string path;
    for (const auto* part : path_) {
      path += *part + ".";
    }
    fail(
        "[{}] '{}{}' was registered below a sharded module after fully_shard, and is not sharded: each rank would "
        "train it on its own. Call fully_shard on the module that was added, or freeze it; what is to stay as it is "
        "belongs in ignored_params",
        operation_,
        path,
        name);
  }

  const char* operation_;
  std::vector<KnownIgnored> sharded_; // of the sharded modules above, and of this one
  std::vector<const std::string*> path_;
};

} // namespace

void note_ignored(const std::shared_ptr<engine::Unit>& unit, const std::vector<at::Tensor>& ignored) {
  auto known = std::make_shared<Ignored>();
  for (const auto& tensor : ignored) {
    known->try_emplace(tensor.unsafeGetTensorImpl(), tensor.getIntrusivePtr());
  }
  std::lock_guard lock(mutex);
  std::erase_if(ignored_by_unit, [](const auto& item) { return item.first.expired(); });
  if (!known->empty()) {
    ignored_by_unit[unit] = std::move(known);
  }
}

void check_none(const torch::nn::Module& module, const char* operation) {
  if (has_strangers(module)) { // or parameters that are ignored, or shown whole, or in no unit
    Search(operation).look_below(module);
  }
}

} // namespace fsdp::nn::strangers
