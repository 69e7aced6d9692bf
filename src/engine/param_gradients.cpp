// How a parameter's gradient comes from its handle to its shard.

#include <utility>

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "base/caller.h"
#include "base/check.h"
#include "base/nonzero.h"
#include "base/view_into.h"
#include "engine/backward_graph.h"
#include "engine/bucket.h"
#include "engine/flat_shard.h"
#include "engine/internal_scope.h"
#include "engine/param.h"
#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

/// Runs after a backward has put a handle's gradient together.
struct GradientHook : torch::autograd::PostAccumulateGradHook {
  explicit GradientHook(Param* param) : param(param), unit(param->unit().weak_from_this()), name(param->name()) {}
  void operator()(const torch::autograd::Variable& handle) override {
    called_by_torch([&] { arrived(handle); });
  }
  void arrived(const at::Tensor& handle) {
    const auto alive = unit.lock(); // the handle's storage keeps it, unless the tensor was given another
    FSDP_CHECK(
        alive && !param->handle_was_replaced(handle),
        "[backward] the data of '{}' were replaced after fully_shard, so that it is trained no more: copy new values "
        "into it in no-grad mode, or into the shard that parameters() shows",
        name);
    alive->runtime().gradient_arrived(*param, handle);
  }
  Param* param; // lives as long as its unit
  std::weak_ptr<Unit> unit;
  std::string name;
};

bool has_hooks_of_another_language(const at::Tensor& leaf) {
  const auto* autograd = torch::autograd::impl::get_autograd_meta(leaf);
  return autograd != nullptr && !autograd->hooks_.empty() && autograd->cpp_hooks_list_ == nullptr;
}

} // namespace

at::Tensor Param::shard_gradient() const {
  return waiting_.is_shown() || !shown_ ? waiting_.own(shard_) : shown_->gradient();
}

const void* Param::change_by(const at::Tensor& gradient) const {
  if (gradient.numel() == 0 || !gradient.is_cpu()) {
    return nullptr;
  }
  const auto index = gradient.is_non_overlapping_and_dense() ? nonzero_element(gradient) : 0;
  auto& storage = *shard_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const auto* memory = static_cast<const char*>(storage._mutable_data_ptr_no_checks().get());
  return index && memory ? memory + (shard_.storage_offset() + *index) * c10::elementSize(shard_dtype()) : nullptr;
}

void Param::move_waiting_gradient(WaitingMove move) {
  if (move == WaitingMove::kShow) {
    if (gradient.defined()) {
      waiting_.show(shard_, gradient, unit_);
    }
  } else if (waiting_.is_shown() && !waiting_.take_back(shard_, name_)) {
    gradient.reset();
  }
}

bool Param::gradient_was_dropped() const {
  return !shown_ && !shard_.grad().defined();
}

void Param::follow_dropped_gradient() {
  if (!handle_is_registered_ || !stands_in_ || shown_ || !shard_.grad().defined()) {
    return;
  }
  if (const at::Tensor handle = present_handle(); handle.defined() && !handle.grad().defined()) {
    stands_in_ = false;
    shard_.mutable_grad().reset();
  }
}

void Param::give_shard_gradient(at::Tensor gradient) {
  const bool of_flat = bucket_.flat_shard() != nullptr;
  const bool lies_well =
      gradient.sizes() == c10::IntArrayRef(shard_sizes_) && gradient.strides() == c10::IntArrayRef(shard_strides_);
  if (!of_flat && !lies_well) {
    gradient = view_into(gradient, gradient.scalar_type(), shard_sizes_, shard_strides_, 0);
  }
  const auto dtype = unit_.policy.keep_gradient_dtype ? gradient.scalar_type() : shard_.scalar_type();
  if (gradient.scalar_type() != dtype || gradient.device() != shard_.device()) {
    gradient = gradient.to(shard_.device(), dtype);
  }
  UserScope scope;
  shown_ ? shown_->give_gradient(std::move(gradient)) : give_gradient_to(shard_, std::move(gradient));
}

void Param::require_grad_of_shard(bool required) {
  shown_ ? shown_->set_requires_grad(required) : (void)shard_.set_requires_grad(required);
}

void Param::train(bool wanted) {
  require_grad_of_shard(wanted);
  follow_requires_grad();
}

void Param::agree_on_requires_grad() {
  const at::Tensor handle = present_handle();
  if (const bool wish = handle.requires_grad(); wish != requires_grad_) {
    require_grad_of_shard(wish);
  }
  const bool wanted = trainable();
  if (handle.is_leaf() && handle.requires_grad() != wanted) {
    handle.set_requires_grad(wanted);
  }
  requires_grad_ = handle.requires_grad();
  if (wanted && !hooked_) {
    install_gradient_hooks(handle);
    hooked_ = true;
  }
}

void Param::install_gradient_hooks(const at::Tensor& handle) {
  torch::autograd::impl::set_post_acc_grad_hooks(handle, std::make_unique<GradientHook>(this));
  if (has_hooks_of_another_language(handle)) { // in whose place ours would be; the first of them does the same
    return;
  }
  handle.register_hook(
      [this, unit = unit_.weak_from_this(), impl = handle.unsafeGetTensorImpl()](const at::Tensor& gradient) {
        const auto alive = unit.lock();
        if (!alive || !gradient.defined()) { // given another storage, as `GradientHook` says; or nothing is added
          return;
        }
        called_by_torch([&] {
          follow_requires_grad(); // users may have frozen it for another forward, and thawed it since
          const at::Tensor leaf(c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>::reclaim_copy(impl));
          if (trainable() && BackwardGraph::current_adds_to(leaf)) { // else `autograd::grad` hands it to the caller
            take_off_stand_in(impl->mutable_grad());
          }
        });
      });
}

// What stands in for the last gradient must not be added to the next.
void Param::take_off_stand_in(at::Tensor& gradient) {
  follow_dropped_gradient();
  if (gradient.is_same(stand_in_)) {
    stand_in_was_taken_off();
    gradient.reset();
  }
}

void Param::note_checkpointed_use(int64_t segment) {
  if (segment != last_segment_) {
    last_segment_ = segment;
    unit_.expect_gradients(expected_++ == 0);
  }
}

void Param::expect_gradient(const BackwardGraph& graph, bool nested) {
  if (nested && expected_ > 0) {
    return;
  }
  if (graph.reaches(present_handle())) {
    unit_.expect_gradients(expected_++ == 0);
  }
}

bool Param::take_gradient(const at::Tensor& handle) {
  if (at::Tensor arrived = handle.grad(); arrived.defined() && !arrived.is_same(stand_in_)) {
    handle.mutable_grad() = stand_in_;
    stands_in_ = true;
    if (trainable()) {
      add_gradient(std::move(arrived));
    }
  } // else there is none, or it was frozen since the graph was made, and so was its handle
  return expected_ > 0 && unit_.gradient_came(--expected_ == 0);
}

void Param::add_gradient(at::Tensor arrived) {
  unit_.gradient_on_stream(/*adds=*/gradient.defined());
  if (arrived.requires_grad()) {
    arrived = arrived.detach();
  }
  if (arrived.layout() != c10::kStrided) {
    arrived = arrived.to_dense();
  }
  const bool of_a_subclass = arrived.key_set().has(c10::DispatchKey::Python);
  const bool is_seen_otherwise = arrived.is_conj() || arrived.is_neg(); // than it lies in memory
  if (of_a_subclass || is_seen_otherwise || arrived.strides() != c10::IntArrayRef(layout_.strides())) {
    auto dense = at::empty_strided(layout_.sizes(), layout_.strides(), arrived.options());
    dense.copy_(arrived);
    arrived = dense;
  }
  if (gradient.defined()) {
    gradient.add_(arrived);
  } else {
    gradient = std::move(arrived);
    if (const auto dtype = unit_.reduce_dtype_of(*this); gradient.scalar_type() != dtype) {
      gradient = gradient.to(dtype);
    }
  }
}

void Param::forget_uses() {
  expected_ = 0;
}

void Param::drop_gradient() {
  gradient.reset();
  partial.reset();
  follow_dropped_gradient();
  const at::Tensor handle = present_handle();
  if (handle.defined() && !handle.grad().is_same(stand_in_)) { // but one that was refused, or none: it broke off
    stands_in_ = shard_gradient().defined();
    handle.mutable_grad() = stands_in_ ? stand_in_ : at::Tensor();
  }
}

bool Param::takes_part_in_reduction() const {
  const UnitPolicy& policy = unit_.policy;
  const bool was_put_off = partial.defined() && policy.requires_all_reduce;
  return gradient.defined() || was_put_off || (policy.reduce_unused_params && trainable());
}

} // namespace fsdp::engine
