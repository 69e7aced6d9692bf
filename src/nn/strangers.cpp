#include "nn/strangers.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "engine/flat_shard.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "nn/registry.h"
#include "nn/slots.h"

namespace fsdp::nn::strangers {

namespace {

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
      sharded_.push_back(unit.get());
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
    const bool ignored = std::any_of(sharded_.begin(), sharded_.end(), [&](const engine::Unit* unit) {
      return unit->ignored.count(parameter.unsafeGetTensorImpl()) > 0;
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
  std::vector<const engine::Unit*> sharded_; // of the modules above, and of this one; each call below holds its own
  std::vector<const std::string*> path_;
};

} // namespace

void check_none(const torch::nn::Module& module, const char* operation) {
  if (has_strangers(module)) { // or parameters that are ignored, or shown whole, or in no unit
    Search(operation).look_below(module);
  }
}

} // namespace fsdp::nn::strangers
