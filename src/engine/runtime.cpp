#include "engine/runtime.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/engine.h>

#include "base/caller.h"
#include "base/check.h"
#include "base/tracing.h"
#include "engine/checkpoint_scope.h"
#include "engine/internal_scope.h"
#include "engine/param.h"
#include "engine/prediction.h"
#include "engine/unit.h"

namespace fsdp::engine {

Runtime::Runtime(c10::Device device)
    : device_(device),
      gather_stream_(new_stream(device, /*high_priority=*/true)),
      reduce_stream_(new_stream(device, /*high_priority=*/true)),
      all_reduce_stream_(new_stream(device, /*high_priority=*/true)),
      on_streams_(has_streams(device)),
      last_stream_(current_stream(device)) {
  tracing::start_if_asked();
}

Runtime::~Runtime() = default;

// Who has the lock may need the caller's lock: the one who waits must not hold it.
std::unique_lock<std::recursive_mutex> Runtime::lock() {
  std::unique_lock held(mutex_, std::try_to_lock);
  if (!held) {
    WithoutCallersLock scope;
    held.lock();
  }
  return held;
}

void Runtime::add(Unit& unit) {
  units_.resize(std::max<size_t>(units_.size(), unit.number() + 1));
  units_[unit.number()] = &unit;
  if (unit.state() != UnitState::kSharded) {
    unsharded_.push_back(&unit);
  }
  bound_reductions();
}

void Runtime::bound_reductions() {
  std::optional<int64_t> most;
  for (const Unit* unit : units_) {
    most = unit != nullptr ? std::max(most, unit->policy.max_reductions) : most;
  }
  if (most) {
    reducer_.set_max_in_flight(*most);
  }
}

void Runtime::remove(Unit& unit) {
  auto guard = lock();
  std::replace(units_.begin(), units_.end(), &unit, static_cast<Unit*>(nullptr));
  std::erase(unsharded_, &unit);
  reducer_.forget(unit);
  if (last_ == &unit) {
    last_ = nullptr;
  }
  const bool parameters_left = std::any_of(
      units_.begin(), units_.end(), [](const Unit* left) { return left != nullptr && !left->params().empty(); });
  if (!parameters_left) {
    const auto last_ones = std::exchange(kept_, {});
  }
}

void Runtime::keep(std::shared_ptr<Unit> unit) {
  kept_.push_back(std::move(unit));
}

void Runtime::adopt(Runtime& other) {
  auto guard = lock();
  InternalScope scope;
  other.reducer_.finish();
  other.reducer_.deliver_copies();
  in_step_ = in_step_ || other.in_step_;
  auto self = shared_from_this();
  auto kept = std::move(other.kept_);
  kept_.insert(kept_.end(), kept.begin(), kept.end());
  is_last_backward_ = is_last_backward_ && other.is_last_backward_;
  post_optim_event_ = post_optim_event_ ? post_optim_event_ : other.post_optim_event_;
  for (Unit* unit : std::vector<Unit*>(other.units_)) {
    if (unit != nullptr) {
      unit->join(self, static_cast<int>(units_.size()));
    }
  }
  training_.forget();
  evaluating_.forget();
}

Schedule& Runtime::schedule_for(Phase phase) {
  const bool training = phase == Phase::kBackward || c10::GradMode::is_enabled() || CheckpointForward::current() >= 0;
  return training ? training_ : evaluating_;
}

void Runtime::touch(const TouchedUnits& units, Phase phase) {
  auto guard = lock();
  Schedule& schedule = schedule_for(phase); // before the scope below turns grad mode off
  InternalScope scope;
  const tracing::Span span(phase == Phase::kForward ? "touch" : "touch in backward", units[0]->display_name());
  if (phase == Phase::kBackward) {
    begin_backward();
  }
  const Unit* before = last_;
  for (Unit* unit : units) {
    unit->requested = unit->prefetched = false;
    unit->used_in_backward |= phase == Phase::kBackward;
    if (unit != last_ || phase != last_phase_) {
      schedule.touched({unit->number(), phase});
      last_ = unit;
      last_phase_ = phase;
    }
  }
  current_is_whole_ = false;
  release_left_behind(units, phase, schedule, before);
  for (Unit* unit : units) {
    unit->unshard();
  }
  prefetch(*last_, phase, schedule);
  for (Unit* unit : units) {
    unit->unshard(); // again, if a prefetched unit's shards had to move, for which all readers let go
    unit->wait();
  }
  current_is_whole_ = true;
  last_stream_ = on_streams_ ? current_stream(device_) : last_stream_;
  reducer_.progress();
}

void Runtime::release_left_behind(
    const TouchedUnits& touched, Phase phase, const Schedule& schedule, const Unit* before) {
  for (Unit* unit : std::vector<Unit*>(unsharded_)) {
    if (std::find(touched.begin(), touched.end(), unit) == touched.end()) {
      unit->leave();
    }
    if (!keeps(*unit, touched, phase, schedule, before)) {
      unit->reshard(/*left_in=*/phase);
    }
  }
}

bool Runtime::keeps(
    Unit& unit, const TouchedUnits& touched, Phase phase, const Schedule& schedule, const Unit* before) const {
  if (unit.held > 0 || unit.requested || unit.prefetched ||
      std::find(touched.begin(), touched.end(), &unit) != touched.end()) {
    return true;
  }
  if (unit.is_private()) {
    return false;
  }
  const bool contains_touched =
      std::any_of(touched.begin(), touched.end(), [&](const Unit* other) { return unit.is_ancestor_of(*other); });
  const bool waits_for_backward =
      phase == Phase::kBackward && !unit.used_in_backward && !unit.reshards_after(Phase::kForward);
  if (contains_touched || waits_for_backward || !unit.reshards_after(phase)) {
    return true;
  }
  if (!schedule.known()) {
    return &unit == before; // units touched in turns must not thrash
  }
  const auto next = schedule.upcoming(std::max<size_t>(prefetch_, 1));
  return std::find(next.begin(), next.end(), unit.number()) != next.end();
}

void Runtime::prefetch(Unit& unit, Phase phase, const Schedule& schedule) {
  const auto& listed = phase == Phase::kForward ? unit.policy.forward_prefetch : unit.policy.backward_prefetch;
  for (const auto& weak : listed) {
    if (auto next = weak.lock(); next && next->state() == UnitState::kSharded) {
      next->unshard();
      next->prefetched = true;
    }
  }
  if (!listed.empty()) {
    return;
  }
  for (int number : schedule.upcoming(prefetch_)) {
    Unit* next = units_[number];
    if (next != nullptr && (phase == Phase::kForward || next->policy.prefetch_in_backward)) {
      next->unshard();
    }
  }
}

void Runtime::write(Unit& unit, const Param& param) {
  auto guard = lock();
  InternalScope scope;
  if (param.bucket().is_private()) {
    return;
  }
  FSDP_CHECK(
      !in_step_ && !backward_queued_,
      "[write to parameter] '",
      param.name(),
      "' was written between the beginning of a forward and the end of its backward, where ",
      "the graph still needs its old value. Write it before the forward or after the backward (after a forward ",
      "without backward, call reset_iter_state() on the root first, ",
      "or run that forward in no-grad mode)");
  for (Unit* other : std::vector<Unit*>(unsharded_)) {
    if (other != &unit && other->is_private() && other->held == 0) {
      other->reshard();
    }
  }
  unit.unshard();
  unit.wait();
  unit.make_private(param.bucket());
  last_ = nullptr; // the next touch, of whatever unit, goes the long way
}

void Runtime::forward_begins() {
  FSDP_CHECK(
      !backward_queued_,
      "[forward] the last backward broke off in the middle, and has left gradients behind: ",
      "call reset_iter_state() on the root first, on all ranks");
  if (!std::exchange(in_step_, true)) {
    follow_requires_grad();
  }
}

void Runtime::follow_requires_grad() {
  for (Unit* unit : units_) {
    if (unit != nullptr) {
      unit->follow_requires_grad();
    }
  }
}

void Runtime::begin_backward() {
  if (backward_queued_) {
    return;
  }
  backward_queued_ = true;
  auto self = shared_from_this();
  if (CheckpointBackward::active()) {
    CheckpointBackward::end_with_outer_backward(self);
    return;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([weak = std::weak_ptr<Runtime>(self)] {
    if (auto runtime = weak.lock()) {
      called_by_torch([&] { runtime->end_backward(); });
    }
  });
}

void Runtime::gradient_arrived(Param& param, const at::Tensor& handle) {
  auto guard = lock();
  const bool in_checkpoint = CheckpointBackward::active();
  InternalScope scope;
  begin_backward();
  Unit& unit = param.unit();
  param.take_gradient(handle, in_checkpoint);
  reducer_.progress(); // often: gradients in flight are memory
  if (unit.take_ready()) {
    auto keep_alive = unit.shared_from_this();
    if (unit.policy.reshard_after_backward && unit.held == 0 && !unit.requested) {
      unit.reshard();
      current_is_whole_ = current_is_whole_ && last_ != &unit;
    }
    // Where ranks may use different units, only the end of backward is the same moment, and a fixed order the same
    // order.
    if (!unit.policy.reduce_unused_params) {
      reduce(unit);
    }
  }
}

void Runtime::reduce(Unit& unit) {
  if (unit.policy.requires_gradient_sync) {
    unit.reduced = true;
    reducer_.submit(unit);
  }
}

void Runtime::reduce_what_waits() {
  for (size_t i = units_.size(); i-- > 0;) {
    Unit* unit = units_[i];
    if (unit != nullptr && unit->awaits_reduction()) {
      reduce(*unit);
    }
  }
}

void Runtime::end_backward() {
  auto guard = lock();
  InternalScope scope;
  reduce_what_waits();
  if (is_last_backward_) {
    reducer_.finish();
    reduce_what_waits(); // parts that an earlier backward has put off, and that were still on their way
    reducer_.finish();
  }
  reducer_.deliver_copies();
  for (Unit* unit : std::vector<Unit*>(unsharded_)) {
    if (unit->policy.reshard_after_backward && unit->held == 0 && !unit->requested) {
      unit->reshard();
    }
  }
  for (Unit* unit : units_) {
    if (unit != nullptr) {
      unit->forget_uses();
    }
  }
  training_.end_step();
  backward_queued_ = false;
  in_step_ = false;
  last_ = nullptr;
  current_is_whole_ = false;
  notify(EventKind::kEndBackward, nullptr);
}

void Runtime::reset() {
  auto guard = lock();
  InternalScope scope;
  reducer_.abandon();
  for (Unit* unit : units_) {
    if (unit != nullptr) {
      unit->reset();
    }
  }
  training_.abandon_step();
  evaluating_.abandon_step();
  backward_queued_ = false;
  in_step_ = false;
  is_last_backward_ = true;
  last_ = nullptr;
  current_is_whole_ = false;
}

void Runtime::order_gather() {
  if (!std::exchange(shards_changed_, false)) {
    return; // the stream waited then
  }
  if (post_optim_event_) {
    post_optim_event_->block(gather_stream_);
    post_optim_event_.reset();
  } else {
    wait_stream(gather_stream_, current_stream(device_));
  }
}

void Runtime::unit_changed(Unit& unit, EventKind kind) {
  if (kind == EventKind::kUnshard) {
    unsharded_.push_back(&unit);
  } else if (kind == EventKind::kReshard) {
    std::erase(unsharded_, &unit);
    current_is_whole_ = current_is_whole_ && last_ != &unit;
  }
  notify(kind, &unit);
}

void Runtime::notify(EventKind kind, const Unit* unit) {
  if (!observer_ && !tracing::on()) {
    return;
  }
  const Event event = make_event(kind, unit);
  if (observer_) {
    observer_(event);
  }
  if (tracing::on()) {
    trace(event);
  }
}

void Runtime::trace(const Event& event) {
  const bool ends_step = event.kind == EventKind::kEndBackward;
  if (ends_step || predicted_bytes_ == 0) {
    std::vector<Unit*> living = units_;
    std::erase(living, nullptr);
    predicted_bytes_ = prediction::passing_bytes(living);
  }
  tracing::record_memory({event.whole_bytes, event.gradient_bytes, predicted_bytes_});
  if (ends_step) {
    tracing::flush();
  }
}

Event Runtime::make_event(EventKind kind, const Unit* unit) const {
  Event event{
      kind,
      unit == nullptr ? nullptr : &unit->name(),
      static_cast<int>(unsharded_.size()),
      0,
      reducer_.in_flight(),
      reducer_.bytes_in_flight()};
  for (const Unit* each : units_) {
    if (each != nullptr) {
      event.whole_bytes += each->whole_bytes();
      event.gradient_bytes += each->gradient_bytes();
    }
  }
  return event;
}

} // namespace fsdp::engine
