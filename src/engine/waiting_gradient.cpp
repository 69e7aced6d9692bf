#include "engine/waiting_gradient.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "base/caller.h"
#include "base/check.h"
#include "base/stream.h"
#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

/// Runs before a gradient is added to what stands in a shard's `grad`.
struct TakeBackFirst : torch::autograd::FunctionPreHook {
  TakeBackFirst(std::weak_ptr<Unit> unit, const WaitingGradient& waiting) : unit(std::move(unit)), waiting(waiting) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (const auto alive = unit.lock()) {
      called_by_torch([&] { alive->runtime().gradient_comes_to_shard(waiting); });
    }
    return gradients;
  }
  std::weak_ptr<Unit> unit;
  const WaitingGradient& waiting; // lives as long as its unit
};

} // namespace

void WaitingGradient::show(const at::Tensor& shard, at::Tensor whole, Unit& unit) {
  if (is_shown()) { // by a backward within a hook
    return;
  }
  watch(shard, unit);
  whole_ = std::move(whole);
  own_ = std::exchange(shard.mutable_grad(), whole_);
}

void WaitingGradient::watch(const at::Tensor& shard, Unit& unit) {
  const auto accumulator = torch::autograd::impl::grad_accumulator(shard);
  if (!accumulator) { // frozen: none can come
    return;
  }
  watched_ = std::make_shared<const decltype(accumulator)>(accumulator); // it ends with the graphs that have it
  const auto& hooks = accumulator->pre_hooks();
  const bool watched = std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const TakeBackFirst*>(hook.get()) != nullptr;
  });
  if (!watched) {
    accumulator->add_pre_hook(std::make_unique<TakeBackFirst>(unit.weak_from_this(), *this));
  }
}

bool WaitingGradient::take_back(const at::Tensor& shard, const std::string& name) {
  watched_.reset();
  const at::Tensor whole = std::exchange(whole_, {});
  const at::Tensor shown = std::exchange(shard.mutable_grad(), {});
  const at::Tensor own = std::exchange(own_, {});
  if (!shown.defined()) {
    return false;
  }
  shard.mutable_grad() = own;
  if (!shown.is_same(whole)) {
    FSDP_CHECK(
        shown.sizes() == whole.sizes(),
        "[backward] the gradient of '{}' was replaced by one of sizes {} while it was whole, as no backward has "
        "reduced "
        "it yet: it has sizes {} until one without no_sync does",
        name,
        shown.sizes(),
        whole.sizes());
    whole.copy_(shown);
    if (has_streams(shown.device())) {
      shown.record_stream(current_stream(shown.device())); // whose memory it is, is the users' affair
    }
  }
  return true;
}

at::Tensor WaitingGradient::own(const at::Tensor& shard) const {
  return is_shown() && shard.grad().defined() ? own_ : shard.grad();
}

} // namespace fsdp::engine
