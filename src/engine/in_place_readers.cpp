#include "engine/in_place_readers.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/callers_lock.h"
#include "engine/unit.h"

namespace fsdp::engine::in_place_readers {

namespace {

struct Readers {
  std::vector<Unit*> units; // in the order of entering, which is the same on all ranks
  bool reading = false; // since the last stop
};

std::mutex mutex;
std::unordered_map<Group*, Readers> groups;

} // namespace

void enter(Group& group, Unit& unit) {
  std::lock_guard lock(mutex);
  auto& readers = groups[&group];
  readers.reading = true;
  if (std::find(readers.units.begin(), readers.units.end(), &unit) == readers.units.end()) {
    readers.units.push_back(&unit);
  }
}

void leave(Group& group, Unit& unit) {
  std::lock_guard lock(mutex);
  if (auto found = groups.find(&group); found != groups.end()) {
    std::erase(found->second.units, &unit);
  }
}

bool stop(Group& group) {
  std::vector<Unit*> units;
  {
    std::lock_guard lock(mutex);
    auto& readers = groups.try_emplace(&group, Readers{{}, true}).first->second;
    if (!std::exchange(readers.reading, false)) {
      return false;
    }
    units = readers.units;
  }
  WithoutCallersLock no_callers_lock;
  for (Unit* unit : units) {
    unit->reshard();
  }
  return true;
}

void resume(Group& group) {
  std::lock_guard lock(mutex);
  groups[&group].reading = true;
}

void forget(Group& group) {
  std::lock_guard lock(mutex);
  if (auto found = groups.find(&group); found != groups.end() && found->second.units.empty()) {
    groups.erase(found);
  }
}

} // namespace fsdp::engine::in_place_readers
