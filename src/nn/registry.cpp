#include "nn/registry.h"

#include <mutex>
#include <unordered_map>

#include "engine/unit.h"

namespace fsdp::nn::registry {

namespace {

struct Entry {
  std::weak_ptr<torch::nn::Module> module; // empty for modules on the stack
  bool shared_module;
  std::weak_ptr<engine::Unit> unit;

  bool alive() const {
    return !unit.expired() && !(shared_module && module.expired());
  }
};

std::mutex mutex;
std::unordered_map<const torch::nn::Module*, Entry> entries;

} // namespace

void enter(torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit) {
  std::lock_guard lock(mutex);
  std::erase_if(entries, [](const auto& item) { return !item.second.alive(); });
  auto weak = module.weak_from_this();
  entries[&module] = {weak, !weak.expired(), unit};
}

std::shared_ptr<engine::Unit> find(const torch::nn::Module& module) {
  std::lock_guard lock(mutex);
  auto found = entries.find(&module);
  return found != entries.end() && found->second.alive() ? found->second.unit.lock() : nullptr;
}

} // namespace fsdp::nn::registry
