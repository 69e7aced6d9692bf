#include "engine/runtime.h"

#include <algorithm>
#include <utility>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "base/caller.h"
#include "base/check.h"
#include "base/tracing.h"
#include "engine/at_work.h"
#include "engine/backward_graph.h"
#include "engine/checkpoint_scope.h"
#include "engine/group_users.h"
#include "engine/param.h"
#include "engine/prediction.h"
#include "engine/unit.h"

namespace fsdp::engine {

Runtime::Runtime(c10::Device device)
    : device_(device),
      gather_stream_(new_stream(device, /*high_priority=*/true)),
      reduce_stream_(new_stream(device, /*high_priority=*/true)),
      all_reduce_stream_(new_stream(device, /*high_priority=*/true)) {
  tracing::start_if_asked();
}

Runtime::~Runtime() {
  for (const auto& group : written_unseen_) {
    group_users::forget_unseen_writes(*group);
  }
}

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
  look_at_units();
}

void Runtime::bound_reductions() {
  std::optional<int64_t> most;
  each_unit([&](const Unit& unit) { most = std::max(most, unit.policy.max_reductions); });
  if (most) {
    reducer_.set_max_in_flight(*most);
  }
}

void Runtime::look_at_units() {
  any_gathers_together_ = any_unit([](const Unit& unit) { return unit.gathers_together(); });
}

void Runtime::remove(Unit& unit) {
  auto guard = lock();
  std::replace(units_.begin(), units_.end(), &unit, static_cast<Unit*>(nullptr));
  std::erase(unsharded_, &unit);
  std::erase(delivered_, &unit);
  post_optim_events_.erase(&unit);
  if (delivered_.empty()) {
    changes_.clear();
  }
  reducer_.forget(unit);
  if (last_ == &unit) {
    last_ = nullptr;
  }
  if (!any_unit([](const Unit& left) { return !left.kept; })) {
    const auto last_ones = std::exchange(kept_, {});
  }
}

void Runtime::keep(std::shared_ptr<Unit> unit) {
  unit->kept = true;
  kept_.push_back(std::move(unit));
}

void Runtime::adopt(Runtime& other) {
  const auto alive = other.shared_from_this(); // its units keep it, and leave
  const AtWork at_work(*this);
  other.reducer_.finish();
  other.reducer_.deliver_copies();
  other.deliver_gradients();
  wait_stream(reduce_stream_, other.reduce_stream_); // parts that wait for their all-reduce may be added there yet
  wait_stream(all_reduce_stream_, other.all_reduce_stream_);
  step_.has_begun = step_.has_begun || other.step_.has_begun;
  step_.has_forward = step_.has_forward || other.step_.has_forward;
  step_.is_read = step_.is_read || other.step_.is_read;
  recorded_.until = other.recorded_.until > 0 ? Recorded::kOn : recorded_.until;
  step_.graph_grows = step_.graph_grows || other.step_.graph_grows;
  expects_calls_ = expects_calls_ || other.expects_calls_;
  forward_graph_.take(other.forward_graph_);
  unseen_writes_ = unseen_writes_ || other.unseen_writes_;
  awaits_step_ = awaits_step_ || other.awaits_step_;
  writes_are_seen_ = writes_are_seen_ || other.writes_are_seen_;
  broken_ = broken_ || other.broken_;
  const auto delivered = std::exchange(other.delivered_, {});
  delivered_.insert(delivered_.end(), delivered.begin(), delivered.end());
  for (auto& [group, places] : std::exchange(other.changes_, {})) {
    auto& ours = changes_[group];
    ours.insert(ours.end(), places.begin(), places.end());
  }
  const auto written = std::exchange(other.written_unseen_, {});
  written_unseen_.insert(written_unseen_.end(), written.begin(), written.end());
  auto self = shared_from_this();
  auto kept = std::move(other.kept_);
  kept_.insert(kept_.end(), kept.begin(), kept.end());
  is_last_backward_ = is_last_backward_ && other.is_last_backward_;
  if (other.shards_changed_ || other.unseen_writes_) {
    other.wait_for_writes(gather_stream_);
  }
  post_optim_events_.merge(other.post_optim_events_);
  other.each_unit([&](Unit& unit) { unit.join(self, static_cast<int>(units_.size())); });
  training_ = Schedule();
  evaluating_ = Schedule(/*repeats=*/true);
}

bool Runtime::trains_something() const {
  return any_unit([](const Unit& unit) {
    return std::any_of(
        unit.params().begin(), unit.params().end(), [](const auto& param) { return param->trainable(); });
  });
}

void Runtime::forward_begins() {
  check_not_broken("forward");
  if (!std::exchange(step_.has_begun, true)) {
    follow_requires_grad();
  }
  if (!expects_calls_ || running_calls > 0) {
    step_.has_forward = step_.graph_grows = true;
  } else {
    look_at_forward_graph(); // before this use, outside of all calls, records something
  }
}

void Runtime::look_at_forward_graph() {
  if (!std::exchange(step_.graph_grows, false)) {
    return;
  }
  auto guard = lock();
  forward_graph_.forget_what_is_gone();
  each_unit([this](const Unit& unit) {
    for (const auto& param : unit.params()) {
      forward_graph_.note(param->present_handle());
    }
  });
}

bool Runtime::needs_old_values() {
  if (!step_.has_forward || !expects_calls_ || running_calls > 0) {
    return step_.has_forward;
  }
  look_at_forward_graph();
  return forward_graph_.lives();
}

bool Runtime::backward_runs() const {
  return backward_.runs ||
         (step_.has_forward && phase_in(torch::autograd::get_current_graph_task_id()) == Phase::kBackward);
}

void Runtime::check_not_broken(const char* operation) const {
  FSDP_CHECK(
      !broken_ && (!backward_.runs || torch::autograd::get_current_graph_task_id() >= 0),
      "[{}] the last backward broke off in the middle, and has left gradients behind: call reset_iter_state() on the "
      "root first, on all ranks",
      operation);
}

void Runtime::follow_requires_grad() {
  each_unit([](Unit& unit) { unit.follow_requires_grad(); });
}

void Runtime::follow_profiler() {
  const auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  const bool looked_at = callbacks && callbacks->needs_inputs_;
  if (looked_at == looked_at_) {
    return;
  }
  auto guard = lock();
  looked_at_ = looked_at;
  each_unit([looked_at](const Unit& unit) {
    for (const auto& param : unit.params()) {
      param->let_look(looked_at);
    }
  });
}

namespace {

/// Queued to be run at the end of a backward. If it goes without having been run, that ended in an exception.
class EndOfBackward {
 public:
  EndOfBackward(std::weak_ptr<Runtime> runtime, int64_t number) : runtime_(std::move(runtime)), number_(number) {}
  ~EndOfBackward() {
    if (auto runtime = done_ ? nullptr : runtime_.lock()) {
      runtime->backward_broke(number_);
    }
  }
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;

  void run() {
    if (auto runtime = runtime_.lock()) {
      called_by_torch([&] { runtime->end_backward(); });
    }
    done_ = true;
  }

 private:
  std::weak_ptr<Runtime> runtime_;
  int64_t number_;
  bool done_ = false;
};

} // namespace

void Runtime::backward_broke(int64_t number) {
  broken_ = broken_ || number == backwards_;
}

void Runtime::begin_backward() {
  check_not_broken("backward");
  if (backward_.runs) {
    return;
  }
  follow_profiler();
  const BackwardGraph graph = CheckpointBackward::outermost();
  backward_ = {
      .runs = true,
      .graph = graph.id(),
      .may_repeat = graph.is_kept(),
      .is_for_all = graph.is_for_all_leaves() && (expects_calls_ || step_.is_read || leads_here(graph))};
  const auto end = std::make_shared<EndOfBackward>(weak_from_this(), ++backwards_);
  CheckpointBackward::at_end([end] { end->run(); });
  each_unit([&graph](Unit& unit) {
    unit.expect_gradients(graph, /*nested=*/false);
    unit.move_waiting_gradients(WaitingMove::kTakeBack);
  });
}

void Runtime::gradient_comes_to_shard(const WaitingGradient& waiting) {
  const AtWork at_work(*this);
  if (!waiting.is_shown()) {
    return;
  }
  begin_backward();
  // A penalty by itself is for no step: ranks may differ in whether it meets a gradient that waits.
  if (!leads_here(CheckpointBackward::outermost())) {
    backward_.is_for_all = false;
    backward_.may_repeat = true;
  }
}

void Runtime::gradient_arrived(Param& param, const at::Tensor& handle) {
  if (take_gradient(param, handle)) {
    deliver_gradients();
  }
}

// Users' functions may wait for another thread, which may need the lock.
void Runtime::deliver_gradients() {
  const InternalScope scope;
  while (true) {
    auto guard = lock();
    const auto next = reducer_.next_delivery();
    guard.unlock();
    if (!next) {
      return;
    }
    next->param->give_shard_gradient(next->gradient);
  }
}

bool Runtime::take_gradient(Param& param, const at::Tensor& handle) {
  auto guard = lock();
  const BackwardGraph graph = BackwardGraph::current();
  InternalScope scope;
  begin_backward();
  if (!std::exchange(backward_.has_gradients, true)) {
    end_unseen_writes(); // the optimizer has long written
  }
  Unit& unit = param.unit();
  if (graph.id() != backward_.graph) {
    unit.expect_gradients(graph, /*nested=*/true);
  }
  const bool all_have_come = param.take_gradient(handle);
  reducer_.progress(); // often: gradients in flight are memory
  if (all_have_come) {
    auto keep_alive = unit.shared_from_this();
    if (unit.policy.reshard_after_backward && unit.held == 0 && !unit.requested) {
      unit.reshard();
    }
    // Where ranks may use different units, only the end of backward is the same moment, and a fixed order the same
    // order.
    if (!unit.policy.reduce_unused_params) {
      reduce(unit);
    }
    if (unit.policy.next_in_backward == NextInBackward::kWhenDone) {
      prefetch(unit, Phase::kBackward, training_);
    }
  }
  return reducer_.has_deliveries();
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

void Runtime::end_step() {
  step_ = {};
  forward_graph_.clear();
}

void Runtime::end_backward() {
  finish_backward();
  deliver_gradients();
  const AtWork at_work(*this);
  if (!backward_.runs) { // another one, of which the end shows them
    each_unit([](Unit& unit) { // in the places of those that were delivered
      unit.move_waiting_gradients(WaitingMove::kShow);
    });
  }
}

void Runtime::finish_backward() {
  const AtWork at_work(*this);
  // Else it was for the sake of another backward.
  const bool step_is_over = backward_.has_gradients || !backward_.may_repeat;
  // What earlier backwards have left, and zeros, go with the gradients of this one. Not if it brought none and was for
  // some leaves only, a penalty's, say, or a look at the input's: ranks may differ in whether they come here for it.
  const bool reduces = backward_.has_gradients || backward_.is_for_all;
  if (reduces) {
    if (!backward_.has_gradients && any_unit([](const Unit& unit) { return unit.awaits_reduction(); })) {
      end_unseen_writes(); // as the first gradient does
    }
    reduce_what_waits();
  }
  if (is_last_backward_ && reduces) {
    reducer_.finish();
    each_unit([](Unit& unit) { unit.reduced = unit.reduced && !unit.has_put_off_parts(); }); // they were on their way
    reduce_what_waits();
    reducer_.finish();
  }
  reducer_.deliver_copies();
  const std::vector<Unit*> left(unsharded_);
  for (Unit* unit : left) {
    unit->requested = unit->requested && !(step_is_over && reduces);
    if (unit->policy.reshard_after_backward && unit->held == 0 && !unit->requested) {
      unit->reshard();
    }
    if (unit->offloaded() && has_streams(device_)) { // the host may write: no copy of its shards may be under way
      unit->wait();
      for (const auto& bucket : unit->buckets()) {
        bucket->begin_write();
      }
    }
  }
  each_unit([step_is_over](Unit& unit) { step_is_over ? unit.forget_uses() : unit.end_backward(); });
  if (step_is_over) {
    training_.end_step();
    end_step();
  }
  step_.within = backward_.graph; // what hooks read from here on, they look at
  backward_ = {};
  last_ = nullptr;
  if (is_last_backward_ && reduces && !delivered_.empty()) {
    open_for_unseen_writes();
  }
  notify(EventKind::kEndBackward, nullptr);
}

void Runtime::reset() {
  const AtWork at_work(*this);
  each_unit([this](const Unit& unit) { reducer_.forget(unit); });
  each_unit([](Unit& unit) { unit.reset(); });
  training_.abandon_step();
  evaluating_.abandon_step();
  backward_ = {};
  ++backwards_; // what the broken one has queued may go later
  broken_ = false;
  delivered_.clear();
  changes_.clear();
  end_step();
  is_last_backward_ = true;
  last_ = nullptr;
}

void Runtime::unit_changed(Unit& unit, EventKind kind) {
  if (kind == EventKind::kUnshard) {
    unsharded_.push_back(&unit);
  } else if (kind == EventKind::kReshard) {
    std::erase(unsharded_, &unit);
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
  each_unit([&event](const Unit& each) {
    event.whole_bytes += each.whole_bytes();
    event.gradient_bytes += each.gradient_bytes();
  });
  return event;
}

} // namespace fsdp::engine
