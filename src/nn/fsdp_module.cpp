
#include <fsdp/fully_shard.h>

#include "base/check.h"
#include "engine/at_work.h"
#include "engine/unit.h"

namespace fsdp {

using engine::Unit;

namespace {

template <typename Do>
void for_each_unit(Unit& top, bool recurse, const Do& apply) {
  for (Unit* unit : recurse ? top.with_those_below() : std::vector{&top}) {
    apply(*unit);
  }
}

void check_root(const Unit& unit, const char* operation) {
  FSDP_CHECK(
      unit.parent() == nullptr,
      "[{}] is for the root, but '{}' lies below '{}': call it on what fully_shard returned for the outermost module",
      operation,
      unit.display_name(),
      unit.parent()->display_name());
}

std::vector<std::weak_ptr<Unit>> units_of(const std::vector<FSDPModule>& modules) {
  std::vector<std::weak_ptr<Unit>> units;
  for (const auto& module : modules) {
    units.push_back(module.unit());
  }
  return units;
}

} // namespace

void UnshardHandle::wait() {
  if (auto unit = unit_.lock()) {
    const engine::AtWork at_work(unit->runtime());
    unit->wait();
  }
}

FSDPModule::FSDPModule(std::shared_ptr<Unit> unit) : unit_(std::move(unit)) {}

UnshardHandle FSDPModule::unshard(bool async_op) {
  const engine::AtWork at_work(unit_->runtime());
  if (unit_->left_by_backward && unit_->held == 0) {
    unit_->reshard();
  }
  unit_->unshard();
  unit_->requested = true;
  unit_->ahead = engine::GatheredFor::kWhoeverComes;
  UnshardHandle handle(unit_);
  if (!async_op) {
    handle.wait();
  }
  return handle;
}

void FSDPModule::reshard() {
  const engine::AtWork at_work(unit_->runtime());
  if (unit_->held == 0) { // a guard that shows it whole gives it back
    unit_->reshard();
  }
}

void FSDPModule::note_shard_writes() {
  unit_->runtime().expect_unseen_writes();
}

void FSDPModule::reset_iter_state() {
  check_root(*unit_, "reset_iter_state");
  unit_->runtime().reset();
}

void FSDPModule::set_is_last_backward(bool is_last_backward) {
  unit_->runtime().set_is_last_backward(is_last_backward);
}

void FSDPModule::set_requires_gradient_sync(bool requires_gradient_sync, bool recurse) {
  for_each_unit(*unit_, recurse, [&](Unit& unit) {
    unit.policy.requires_gradient_sync = requires_gradient_sync;
    unit.policy.requires_all_reduce = requires_gradient_sync;
  });
}

void FSDPModule::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  for_each_unit(*unit_, recurse, [&](Unit& unit) { unit.policy.requires_all_reduce = requires_all_reduce; });
}

void FSDPModule::set_reshard_after_forward(bool reshard_after_forward, bool recurse) {
  for_each_unit(*unit_, recurse, [&](Unit& unit) {
    unit.policy.reshard_after_forward = reshard_after_forward;
    unit.policy.reshard_to.reset();
  });
}

void FSDPModule::set_reshard_after_backward(bool reshard_after_backward, bool recurse) {
  for_each_unit(*unit_, recurse, [&](Unit& unit) { unit.policy.reshard_after_backward = reshard_after_backward; });
}

void FSDPModule::set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules) {
  unit_->policy.forward_prefetch = units_of(modules);
}

void FSDPModule::set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules) {
  unit_->policy.backward_prefetch = units_of(modules);
}

void FSDPModule::set_custom_all_gather(AllGatherFn all_gather) {
  const engine::AtWork at_work(unit_->runtime());
  FSDP_CHECK(
      all_gather != nullptr, "[set_custom_all_gather] the function is empty: give one that fills its first argument");
  unit_->gather_through(std::move(all_gather));
}

void FSDPModule::set_custom_reduce_scatter(ReduceScatterFn reduce_scatter) {
  auto guard = unit_->runtime().lock();
  FSDP_CHECK(
      reduce_scatter != nullptr,
      "[set_custom_reduce_scatter] the function is empty: give one that fills its first argument");
  unit_->reduce_through(std::move(reduce_scatter));
}

void FSDPModule::set_all_reduce_hook(std::function<void(at::Tensor&)> hook, std::optional<c10::Stream> stream) {
  FSDP_CHECK(
      !stream || unit_->mesh().ndim() == 1,
      "[set_all_reduce_hook] a stream cannot be given on a hybrid mesh, which all-reduces by itself: leave it out");
  unit_->policy.all_reduce_hook = std::move(hook);
  unit_->policy.all_reduce_hook_stream = stream;
}

void FSDPModule::set_post_optim_event(std::shared_ptr<c10::Event> event) {
  check_root(*unit_, "set_post_optim_event");
  unit_->runtime().set_post_optim_event(*unit_, std::move(event));
}

void FSDPModule::set_gradient_divide_factor(std::optional<double> factor) {
  FSDP_CHECK(
      factor != 0,
      "[set_gradient_divide_factor] gradients cannot be divided by 0: give the factor, or nothing for the average");
  unit_->policy.divide_factor = factor;
}

void FSDPModule::set_force_sum_reduction_for_comms(bool) {
  // Reductions never do anything but sum; the division is a step of its own.
}

void FSDPModule::set_reduce_scatter_unused_params(bool enable, bool recurse) {
  for_each_unit(*unit_, recurse, [&](Unit& unit) { unit.policy.reduce_unused_params = enable; });
}

void FSDPModule::set_reduce_scatter_max_input_buffers(int64_t max_input_buffers, bool recurse) {
  FSDP_CHECK(
      max_input_buffers >= 1,
      "[set_reduce_scatter_max_input_buffers] at least 1 buffer is needed, not {}",
      max_input_buffers);
  for_each_unit(*unit_, recurse, [&](Unit& unit) { unit.policy.max_reductions = max_input_buffers; });
  unit_->runtime().bound_reductions();
}

void FSDPModule::set_separate_reduce_scatter_group(bool enable, bool recurse) {
  for_each_unit(*unit_, recurse, [&](Unit& unit) { unit.separate_reductions(enable); });
}

void FSDPModule::set_unshard_in_backward(bool unshard_in_backward) {
  unit_->policy.prefetch_in_backward = unshard_in_backward;
}

void FSDPModule::set_allocate_memory_from_process_group_for_comm(bool enable) {
  FSDP_CHECK(
      !enable || !unit_->has_other_gather_group(),
      "[set_allocate_memory_from_process_group_for_comm] this unit has collectives of its own, which bring their own "
      "memory: use one or the other");
  unit_->use_backend_memory(enable);
}

const std::string& FSDPModule::name() const {
  return unit_->name();
}

void share_comm_ctx(const std::vector<FSDPModule>& modules) {
  for (const auto& module : modules) {
    check_root(*module.unit(), "share_comm_ctx");
  }
  for (size_t i = 1; i < modules.size(); ++i) {
    if (modules[i].unit()->shared_runtime() != modules[0].unit()->shared_runtime()) {
      modules[0].unit()->runtime().adopt(modules[i].unit()->runtime());
    }
  }
}

} // namespace fsdp
