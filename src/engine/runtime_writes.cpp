// Writes to shards, those that operators show and those that nobody shows, and what is gathered after them.

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/at_work.h"
#include "engine/group_users.h"
#include "engine/param.h"
#include "engine/unit.h"

namespace fsdp::engine {

void Runtime::write(Unit& unit, Param& param) {
  const AtWork at_work(*this);
  param.values_change(); // for graphs that no forward has made: whoever goes back through them is told
  if (param.bucket().is_private()) {
    unit.wait(); // on another stream, perhaps
    return;
  }
  FSDP_CHECK(
      !needs_old_values() && !backward_.runs,
      "[write to parameter] '{}' was written between the beginning of a forward and the end of its backward, where the "
      "graph still needs its old value. Write it before the forward or after the backward (after a forward without "
      "backward, call reset_iter_state() on the root first, or run that forward in no-grad mode)",
      param.name());
  for (Unit* other : std::vector<Unit*>(unsharded_)) {
    if (other != &unit && other->is_private() && other->held == 0) {
      other->reshard();
    }
  }
  unit.unshard();
  unit.wait();
  unit.make_private(param.bucket());
  last_ = nullptr;
}

void Runtime::order_gather() {
  if (!std::exchange(shards_changed_, false) && !unseen_writes_) {
    return; // the stream waited then
  }
  wait_for_writes(gather_stream_);
}

void Runtime::wait_for_writes(const Stream& stream) {
  const auto events = std::exchange(post_optim_events_, {});
  for (const auto& [root, event] : events) {
    event->block(stream);
  }
  const auto has_none = [&events](const Unit& unit) { return unit.parent() == nullptr && events.count(&unit) == 0; };
  if (events.empty() || any_unit(has_none)) {
    wait_stream(stream, current_stream(device_));
  }
}

void Runtime::set_post_optim_event(const Unit& root, std::shared_ptr<c10::Event> event) {
  if (event) {
    post_optim_events_[&root] = std::move(event);
  } else {
    post_optim_events_.erase(&root);
  }
}

void Runtime::gradient_delivered(Param& param, const at::Tensor& gradient) {
  if (delivered_.empty() || delivered_.back() != &param.unit()) { // one may come twice, which costs nothing
    delivered_.push_back(&param.unit());
  }
  Group& group = *param.bucket().gather_group;
  if (group.gathers_in_place() && group.size() > 1) {
    constexpr size_t kMost = 64;
    auto& places = changes_[&group];
    if (const void* place = places.size() < kMost ? param.change_by(gradient) : nullptr) {
      places.push_back(place);
    }
  }
}

// [Note: unseen writes] Operators show when shards are written. Kernels that another compiler has made, and whoever has
// an address, do not. So from the end of a backward on, until the next step begins, shards count as written: no rank
// reads them in place any more, and what is gathered then comes after whatever the program did.
void Runtime::open_for_unseen_writes() {
  unseen_writes_ = awaits_step_ = shards_changed_ = true;
  begin_unseen_writes(std::exchange(delivered_, {}));
  for (Unit* unit : std::vector<Unit*>(unsharded_)) {
    unit->wait();
    unit->requested = false;
    if (unit->gathers_together()) {
      unit->kept_through_backward = !unit->policy.reshard_after_backward; // as the program wants it
      if (!unit->kept_through_backward && unit->held == 0) { // it was asked for, and will be out of date
        unit->reshard();
      }
    } else {
      unit->left_by_backward = unit->held == 0; // to gather it again costs nothing
    }
  }
}

namespace {

/// Those in which others read the units' shards in place, each once, with one of its units.
std::vector<std::pair<std::shared_ptr<Group>, const Unit*>> groups_read_in_place(const std::vector<Unit*>& units) {
  std::vector<std::pair<std::shared_ptr<Group>, const Unit*>> groups;
  for (const Unit* unit : units) {
    for (const auto& bucket : unit->buckets()) {
      const auto& group = bucket->gather_group;
      const auto known = [&](const auto& other) { return other.first == group; };
      if (bucket->reads_in_place() && std::none_of(groups.begin(), groups.end(), known)) {
        groups.emplace_back(group, unit);
      }
    }
  }
  return groups;
}

} // namespace

void Runtime::begin_unseen_writes(const std::vector<Unit*>& units) {
  end_unseen_writes(); // of an earlier time, if no step has begun since
  auto changes = std::exchange(changes_, {});
  for (const auto& [group, unit] : groups_read_in_place(units)) {
    written_unseen_.push_back(group);
    const ExpectedWrites expected{.certain = true, .changes = std::move(changes[group.get()])};
    group_users::begin_unseen_writes(*group, expected, unit->label("end of backward"));
  }
}

// Nothing is whole yet, and on streams the first gather comes after them as it is. The time ends at a rank's first
// gather, which waits for others only if this rank has written: ranks may begin with different models. So nobody has to
// end it, and a model that is never trained holds up no other's time.
void Runtime::expect_first_values(const char* operation) {
  const AtWork at_work(*this);
  std::vector<Unit*> units;
  each_unit([&units](Unit& unit) { units.push_back(&unit); });
  for (const auto& [group, unit] : groups_read_in_place(units)) {
    group->begin_unseen_writes({}, unit->label(operation));
  }
}

void Runtime::begin_step(bool certainly) {
  if (!(certainly ? awaits_step_ : unseen_writes_)) {
    return;
  }
  unseen_writes_ = false;
  awaits_step_ = awaits_step_ && !certainly;
  calls_are_noted_ = calls_are_noted_ && certainly;
  shards_changed_ = true;
  for (Unit* unit : std::vector<Unit*>(unsharded_)) {
    const bool stays = unit->requested || unit->kept_through_backward; // as the program wants it
    if (!stays && unit->held == 0) {
      unit->reshard();
    }
  }
  each_unit([](Unit& unit) { unit.drop_shares(); });
  if (certainly) {
    end_unseen_writes();
  }
}

void Runtime::end_unseen_writes() {
  for (const auto& group : std::exchange(written_unseen_, {})) {
    group_users::end_unseen_writes(*group);
  }
}

void Runtime::end_unseen_writes(const std::shared_ptr<Group>& group) {
  const auto open = std::find(written_unseen_.begin(), written_unseen_.end(), group);
  if (open != written_unseen_.end()) {
    written_unseen_.erase(open);
    group_users::end_unseen_writes(*group);
  }
}

void Runtime::expect_unseen_writes() {
  const AtWork at_work(*this);
  each_unit([](Unit& unit) { unit.expect_unseen_writes(); });
  unseen_writes_ = awaits_step_ = true;
}

} // namespace fsdp::engine
