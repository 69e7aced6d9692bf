#include "nn/hidden_parameters.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "engine/param.h"
#include "engine/unit.h"

namespace fsdp::nn::hidden_parameters {

namespace {

struct Hidden {
  std::weak_ptr<engine::Unit> unit;
  engine::Param* param; // lives as long as its unit
};

struct OfModule {
  std::weak_ptr<torch::nn::Module> module; // empty for modules on the stack
  bool shared_module;
  std::map<std::string, Hidden> by_name;

  bool alive() const {
    const auto lives = [](const auto& item) { return !item.second.unit.expired(); };
    return !(shared_module && module.expired()) && std::any_of(by_name.begin(), by_name.end(), lives);
  }
};

std::mutex mutex;
std::unordered_map<const torch::nn::Module*, OfModule> all;

} // namespace

void enter(torch::nn::Module& module, const std::string& name, engine::Param& param) {
  const std::lock_guard lock(mutex);
  std::erase_if(all, [](const auto& item) { return !item.second.alive(); });
  auto& entry = all[&module];
  entry.module = module.weak_from_this();
  entry.shared_module = !entry.module.expired();
  entry.by_name[name] = {param.unit().weak_from_this(), &param};
}

engine::Param* find(const torch::nn::Module& module, const std::string& name) {
  const std::lock_guard lock(mutex);
  const auto entry = all.find(&module);
  if (entry == all.end() || (entry->second.shared_module && entry->second.module.expired())) {
    return nullptr;
  }
  const auto found = entry->second.by_name.find(name);
  return found == entry->second.by_name.end() || found->second.unit.expired() ? nullptr : found->second.param;
}

} // namespace fsdp::nn::hidden_parameters
