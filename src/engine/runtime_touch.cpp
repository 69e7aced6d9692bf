// What follows when operators are about to read handles: which units are gathered, which are released.

#include <algorithm>
#include <utility>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "base/tracing.h"
#include "engine/backward_graph.h"
#include "engine/checkpoint_scope.h"
#include "engine/internal_scope.h"
#include "engine/param.h"
#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine {

bool Runtime::trains(Phase phase) {
  return phase == Phase::kBackward || c10::GradMode::is_enabled() || CheckpointForward::current() >= 0;
}

// [Note: looking alone] Over most groups a gather needs all ranks, so nothing that one rank may do alone can decide
// whether a unit is gathered. What is whole may be read by one rank alone; hence such a touch teaches the schedule
// nothing, fetches nothing and releases nothing. The first touch of what was gathered ahead is another matter: it is
// that for which it was gathered. Not so, in a forward, of what the program has unsharded, for whatever it likes, or of
// what backward will read; nor, where the program tells of calls, outside of these, of what an evaluation has left. Nor
// in the hooks on a parameter's gradient, which run as what adds it up, and that reads no parameter.
bool Runtime::is_look(const Unit& unit, Phase phase, bool training) const {
  if (unit.state() == UnitState::kSharded) {
    return false;
  }
  if (phase == Phase::kForward) {
    if (!any_gathers_together_) {
      return !training && unit.ahead == GatheredFor::kWhoeverComes;
    }
    return unit.ahead == GatheredFor::kBackward ||
           (unit.ahead == GatheredFor::kEvaluation && expects_calls_ && !in_call()) ||
           (unit.ahead == GatheredFor::kWhoeverComes && !(training && in_call()));
  }
  const auto node = torch::autograd::get_current_node();
  return node == nullptr || dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get()) != nullptr;
}

bool Runtime::is_first_touch(const Unit& unit, bool training) const {
  return unit.state() == UnitState::kSharded || (training && unit.ahead != GatheredFor::kNobody) ||
         unit.ahead == GatheredFor::kEvaluation;
}

// Where some gathers need all ranks and others do not, ranks may differ in the latter. An evaluation gains nothing by
// what is learned of these: they move nothing. And ranks that look alone would learn different evaluations, though a
// rank that has nothing to write counts the others' gathers, see [Note: unseen writes] in phases.h.
bool Runtime::takes_note(const Unit& unit, bool training) const {
  const bool comes_again = training || unit.reshards_after(Phase::kForward);
  return comes_again && (unit.gathers_together() || (training && !any_gathers_together_));
}

// [Note: forwards within backwards] A hook, or a function's backward, may train another model, or look at it. What is
// read there is read in a forward, if the backward is another's: it leads to no parameter of ours that gets a gradient,
// and all its nodes are younger than the end of our last call. (To a frozen model's input lead nodes of its call.
// Nodes of a checkpoint's second run are younger, but the one that runs it is not.) Only where the program tells of its
// calls.
bool Runtime::backward_is_of_others() const {
  if (!expects_calls_ || backward_.runs || CheckpointBackward::active()) {
    return false;
  }
  const BackwardGraph graph = BackwardGraph::current();
  return !leads_here(graph) && (recorded_.until == 0 || !graph.has_older(recorded_.until, recorded_.thread));
}

void Runtime::note_call() {
  calls_are_noted_ = true;
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) {
    recorded_ = {Recorded::kOn, at::RecordFunction::currentThreadId()};
    return;
  }
  auto guard = lock();
  if (backward_is_of_others()) {
    step_.within = task;
  }
}

void Runtime::call_ends() {
  if (torch::autograd::get_current_graph_task_id() < 0) {
    recorded_ = {at::sequence_number::peek(), at::RecordFunction::currentThreadId()};
  }
}

bool Runtime::leads_here(const BackwardGraph& graph) const {
  return any_unit([&graph](const Unit& unit) {
    const auto& params = unit.params();
    return std::any_of(
        params.begin(), params.end(), [&](const auto& param) { return graph.has(param->present_handle()); });
  });
}

// Where gathers ask nobody, to gather again costs nothing.
void Runtime::renew_in_place(const TouchedUnits& units, bool training) {
  const bool step_may_begin = training && unseen_writes_ && any_gathers_together_; // else that reshards them
  for (Unit* unit : units) {
    if (unit->held == 0 && (unit->left_by_backward || (step_may_begin && !unit->gathers_together()))) {
      unit->reshard();
    }
  }
}

// Whether a step may begin with it. Where gathers need all ranks, one that reads what is whole may be looking alone.
// But as long as no operator has been seen to write shards, what an evaluation has left whole has to be gathered again.
bool Runtime::is_by_all(const TouchedUnits& units) const {
  const auto gathers = [](const Unit* unit) { return unit->state() == UnitState::kSharded; };
  const auto is_kept = [](const Unit* unit) { return unit->requested || unit->kept_through_backward; };
  if (!any_gathers_together_) {
    return !calls_are_noted_ || std::any_of(units.begin(), units.end(), gathers);
  }
  return std::any_of(units.begin(), units.end(), [&](const Unit* unit) {
    return unit->gathers_together() && (gathers(unit) || !(calls_are_noted_ || writes_are_seen_ || is_kept(unit)));
  });
}

/// What a touch finds of the units that are used in it.
struct Runtime::Found {
  TouchedUnits due; // those before which others are fetched that the program has named
  const Unit* noted = nullptr; // the last one of which the schedule takes note
  bool any_first = false; // touches, of a forward or of a backward
  bool any_by_all = false; // of them, of units that are gathered with the other ranks
};

void Runtime::look_at(Unit& unit, bool training) {
  const bool is_used = !any_gathers_together_ || in_call();
  if (!training && !in_training_call() && is_used && unit.ahead == GatheredFor::kWhoeverComes) {
    unit.requested = false;
    unit.ahead = GatheredFor::kNobody;
  }
}

void Runtime::use(Unit& unit, Phase phase, bool training, Found& found) {
  const bool first = is_first_touch(unit, training);
  const bool ranks_may_differ = any_gathers_together_ && !unit.gathers_together();
  const bool due = phase == Phase::kBackward ? !std::exchange(unit.used_in_backward, true) : first;
  if (due && !ranks_may_differ) {
    found.due.push_back(&unit);
  }
  if (!first) {
    return;
  }
  found.any_first = true;
  unit.gathered_in_backward |= phase == Phase::kBackward;
  unit.requested = unit.prefetched = false;
  unit.ahead = GatheredFor::kNobody;
  if (ranks_may_differ) {
    return;
  }
  found.any_by_all = true;
  last_ = &unit;
  if (takes_note(unit, training)) {
    schedule_of(training).touched({unit.number(), phase});
    found.noted = &unit;
  }
}

void Runtime::touch(const TouchedUnits& units) {
  auto guard = lock();
  const int task = torch::autograd::get_current_graph_task_id();
  if (phase_in(task) == Phase::kBackward && backward_is_of_others()) {
    step_.within = task;
  }
  const Phase phase = phase_in(task);
  const bool training = trains(phase); // before the scope below turns grad mode off
  if (training && task < 0) {
    step_.is_read = true;
    recorded_ = {Recorded::kOn, at::RecordFunction::currentThreadId()};
  }
  InternalScope scope;
  follow_profiler();
  const tracing::Span span(phase == Phase::kForward ? "touch" : "touch in backward", units[0]->display_name());
  if (phase == Phase::kBackward) {
    begin_backward();
  }
  renew_in_place(units, training);
  if (training && is_by_all(units)) {
    begin_step(/*certainly=*/false);
  }
  const Unit* before = last_;
  Found found;
  for (Unit* unit : units) {
    is_look(*unit, phase, training) ? look_at(*unit, training) : use(*unit, phase, training, found);
  }
  if (found.any_first) {
    release_left_behind(units, phase, schedule_of(training), before, found.any_by_all);
  }
  for (Unit* unit : units) {
    unit->unshard();
  }
  for (const Unit* unit : found.due) {
    prefetch_listed(*unit, phase, training);
  }
  const Unit* noted = found.noted;
  if (noted != nullptr && (phase == Phase::kForward || noted->policy.next_in_backward == NextInBackward::kWhenUsed)) {
    prefetch(*noted, phase, schedule_of(training));
  }
  for (Unit* unit : units) {
    unit->unshard(); // again, if a prefetched unit's shards had to move, for which all readers let go
    unit->wait();
  }
  reducer_.progress();
}

GatheredFor Runtime::gathered_for(const Schedule& schedule, Phase phase) const {
  if (&schedule != &training_) {
    return GatheredFor::kEvaluation;
  }
  return phase == Phase::kForward ? GatheredFor::kForward : GatheredFor::kBackward;
}

void Runtime::release_left_behind(
    const TouchedUnits& touched, Phase phase, const Schedule& schedule, const Unit* before, bool by_all) {
  const auto next = schedule.upcoming(std::max<size_t>(prefetch_, 1));
  for (Unit* unit : std::vector<Unit*>(unsharded_)) {
    const bool is_touched = std::find(touched.begin(), touched.end(), unit) != touched.end();
    if (!is_touched) {
      unit->leave();
    }
    if (is_touched || stays(*unit, touched, phase) || (unit->gathers_together() && !by_all)) {
      continue;
    }
    const auto touch =
        std::find_if(next.begin(), next.end(), [&](const auto& each) { return each.unit == unit->number(); });
    const bool trains = &schedule == &training_;
    const bool expected = schedule.known() ? touch != next.end() : unit == before; // in turns, units must not thrash
    if (!expected || unit->is_private()) {
      const bool in_training = trains || in_training_call();
      unit->reshard(in_training && phase == Phase::kForward ? Left::kForItsBackward : Left::kForAnother);
    } else if (schedule.known()) {
      unit->ahead = gathered_for(schedule, touch->phase);
    } else {
      unit->ahead = trains ? GatheredFor::kBackward : GatheredFor::kNobody;
    }
  }
}

bool Runtime::stays(const Unit& unit, const TouchedUnits& touched, Phase phase) {
  if (unit.held > 0 || unit.requested || unit.prefetched) {
    return true;
  }
  const bool contains_touched =
      std::any_of(touched.begin(), touched.end(), [&](const Unit* other) { return unit.is_ancestor_of(*other); });
  const bool waits_for_backward =
      phase == Phase::kBackward && !unit.gathered_in_backward && !unit.reshards_after(Phase::kForward);
  return !unit.is_private() && (contains_touched || waits_for_backward || !unit.reshards_after(phase));
}

static const std::vector<std::weak_ptr<Unit>>& list_of(const Unit& unit, Phase phase) {
  return phase == Phase::kForward ? unit.policy.forward_prefetch : unit.policy.backward_prefetch;
}

void Runtime::prefetch_listed(const Unit& unit, Phase phase, bool training) {
  for (const auto& weak : list_of(unit, phase)) {
    if (auto next = weak.lock(); next && next->state() == UnitState::kSharded) {
      gather_ahead(*next, gathered_for(schedule_of(training), phase));
      next->prefetched = true;
    }
  }
}

void Runtime::prefetch(const Unit& unit, Phase phase, const Schedule& schedule) {
  if (!list_of(unit, phase).empty()) {
    return;
  }
  for (const auto& touch : schedule.upcoming(prefetch_)) {
    Unit* next = units_[touch.unit];
    if (next != nullptr && (touch.phase == Phase::kForward || next->policy.prefetch_in_backward)) {
      gather_ahead(*next, gathered_for(schedule, touch.phase));
    }
  }
}

void Runtime::gather_ahead(Unit& unit, GatheredFor whom) {
  unit.unshard();
  unit.ahead = whom;
}

} // namespace fsdp::engine
