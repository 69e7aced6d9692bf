#include "nn/recurrent.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <optional>

#include <torch/nn/modules/rnn.h>

#include "engine/param.h"
#include "engine/tenant.h"

namespace fsdp::nn {

namespace {

using Weights = std::vector<at::Tensor>;

// The list is protected; a derived class may see it.
template <typename Derived>
struct Listed : torch::nn::detail::RNNImplBase<Derived> {
  static Weights* of(torch::nn::Module& module) {
    auto* recurrent = dynamic_cast<torch::nn::detail::RNNImplBase<Derived>*>(&module);
    return recurrent == nullptr ? nullptr : &(recurrent->*(&Listed::flat_weights_));
  }
};

/// Null for other modules.
Weights* weights_of(torch::nn::Module& module) {
  if (Weights* weights = Listed<torch::nn::LSTMImpl>::of(module)) {
    return weights;
  }
  if (Weights* weights = Listed<torch::nn::GRUImpl>::of(module)) {
    return weights;
  }
  return Listed<torch::nn::RNNImpl>::of(module);
}

/// Empty for a module on the stack, of which nobody knows how long it lives: it is given shards, and operators handles.
using WeakModule = std::optional<std::weak_ptr<torch::nn::Module>>;

/// A handle that its module may have lost. Nobody else may hold it, and its unit lives no longer than it does.
struct Kept {
  WeakModule module;
  size_t index;
  at::Tensor handle;

  bool is_of(const WeakModule& other) const {
    return module && other && !module->owner_before(*other) && !other->owner_before(*module);
  }
  // One on the stack is gone when nobody but us has its registered shard, nor an optimizer.
  bool is_over() const {
    if (module) {
      return module->expired();
    }
    const engine::Param* param = engine::param_of(handle);
    return param == nullptr || param->shard().use_count() == 1;
  }
};

std::mutex mutex;

std::vector<Kept>& kept() {
  static auto* all = new std::vector<Kept>(); // never destroyed: what goes at exit may need what has gone
  return *all;
}

/// Those that fit. What goes with a handle may come here again, so the lock is free when they do.
template <typename Fits>
std::vector<Kept> taken_out(const Fits& fits) {
  std::lock_guard lock(mutex);
  auto& all = kept();
  const auto rest = std::stable_partition(all.begin(), all.end(), [&](const Kept& each) { return !fits(each); });
  std::vector<Kept> taken(std::make_move_iterator(rest), std::make_move_iterator(all.end()));
  all.erase(rest, all.end());
  return taken;
}

void keep(Kept next) {
  const auto former = taken_out([&](const Kept& each) { return each.is_over() || each.handle.is_same(next.handle); });
  std::lock_guard lock(mutex);
  kept().push_back(std::move(next));
}

void give_back(const WeakModule& module) {
  const auto taken = taken_out([&](const Kept& each) { return each.is_over() || each.is_of(module); });
  const auto alive = module ? module->lock() : nullptr;
  Weights* weights = alive ? weights_of(*alive) : nullptr;
  for (const Kept& each : taken) {
    if (weights != nullptr && each.is_of(module) && each.index < weights->size()) {
      (*weights)[each.index] = each.handle;
    }
  }
}

void remember(const WeakModule& module, const Weights& weights, const engine::Unit& unit) {
  for (size_t i = 0; i < weights.size(); ++i) {
    auto* param = engine::param_of(weights[i]);
    if (param != nullptr && &param->unit() == &unit && engine::is_handle(weights[i])) {
      param->add_holder({
          [module, i](const at::Tensor& handle) {
            keep({module, i, handle});
          },
          [module] { give_back(module); },
      });
    }
  }
}

} // namespace

void remember_handles_of_recurrent(torch::nn::Module& module, const engine::Unit& unit) {
  const auto over = taken_out([](const Kept& each) { return each.is_over(); });
  for (const auto& child : module.children()) {
    remember_handles_of_recurrent(*child, unit);
  }
  if (const Weights* weights = weights_of(module)) {
    const auto weak = module.weak_from_this();
    remember(weak.expired() ? std::nullopt : WeakModule(weak), *weights, unit);
  }
}

} // namespace fsdp::nn
