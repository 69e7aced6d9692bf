#include "engine/in_place_readers.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/caller.h"
#include "engine/unit.h"

namespace fsdp::engine::in_place_readers {

namespace {

using Units = std::vector<Unit*>; // in the order of entering, which is the same on all ranks

std::mutex mutex;
std::unordered_map<Group*, Units> readers;

Units readers_of(Group& group) {
  std::lock_guard lock(mutex);
  const auto found = readers.find(&group);
  return found != readers.end() ? found->second : Units();
}

} // namespace

void enter(Group& group, Unit& unit) {
  std::lock_guard lock(mutex);
  Units& units = readers[&group];
  if (std::find(units.begin(), units.end(), &unit) == units.end()) {
    units.push_back(&unit);
  }
}

void leave(Group& group, Unit& unit) {
  std::lock_guard lock(mutex);
  if (auto found = readers.find(&group); found != readers.end()) {
    std::erase(found->second, &unit);
  }
}

void stop(Group& group) {
  const Units units = readers_of(group);
  if (units.empty()) {
    return;
  }
  WithoutCallersLock no_callers_lock;
  for (Unit* unit : units) {
    unit->reshard();
  }
}

void forget(Group& group) {
  std::lock_guard lock(mutex);
  if (auto found = readers.find(&group); found != readers.end() && found->second.empty()) {
    readers.erase(found);
  }
}

} // namespace fsdp::engine::in_place_readers
