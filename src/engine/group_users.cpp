#include "engine/group_users.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/caller.h"
#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine::group_users {

namespace {

struct Users {
  std::vector<std::pair<Unit*, std::weak_ptr<Unit>>>
      readers; // in the order of entering, which is the same on all ranks
  int unseen_writers = 0;
  bool left_unseen = false; // whoever was to end the time of unseen writes went before
};

std::mutex mutex;
std::unordered_map<Group*, Users> users;

/// As they are now; what was left unseen is the caller's to end.
Users take(Group& group) {
  std::lock_guard lock(mutex);
  const auto found = users.find(&group);
  if (found == users.end()) {
    return {};
  }
  Users present = found->second;
  found->second.left_unseen = false;
  return present;
}

/// Whether none is left.
bool count_off_writer(Group& group) {
  std::lock_guard lock(mutex);
  return --users[&group].unseen_writers == 0;
}

void erase_reader(Users& of_group, const Unit& unit) {
  std::erase_if(of_group.readers, [&](const auto& reader) { return reader.first == &unit; });
}

} // namespace

void begin_reading(Group& group, Unit& unit) {
  std::lock_guard lock(mutex);
  Users& of_group = users[&group];
  erase_reader(of_group, unit);
  of_group.readers.emplace_back(&unit, unit.weak_from_this());
}

void end_reading(Group& group, Unit& unit) {
  std::lock_guard lock(mutex);
  if (auto found = users.find(&group); found != users.end()) {
    erase_reader(found->second, unit);
  }
}

void stop_readers(Group& group) {
  const Users present = take(group);
  if (present.left_unseen) {
    group.end_unseen_writes();
  }
  if (present.readers.empty()) {
    return;
  }
  WithoutCallersLock no_callers_lock;
  for (const auto& [address, reader] : present.readers) {
    if (const auto unit = reader.lock()) {
      const auto runtime = unit->shared_runtime(); // outlives the lock, should this be the last to hold the unit
      const auto lock = runtime->lock();
      unit->reshard();
    }
  }
}

void begin_unseen_writes(Group& group, const ExpectedWrites& expected, const Label& label) {
  {
    std::lock_guard lock(mutex);
    Users& of_group = users[&group];
    ++of_group.unseen_writers;
    of_group.left_unseen = false;
  }
  group.begin_unseen_writes(expected, label);
}

void end_unseen_writes(Group& group) {
  if (count_off_writer(group)) {
    group.end_unseen_writes();
  }
}

void forget_unseen_writes(Group& group) {
  std::lock_guard lock(mutex);
  Users& of_group = users[&group];
  of_group.left_unseen = --of_group.unseen_writers == 0;
}

void forget(Group& group, Unit& unit) {
  std::lock_guard lock(mutex);
  if (auto found = users.find(&group); found != users.end()) {
    erase_reader(found->second, unit);
    const Users& left = found->second;
    if (left.readers.empty() && left.unseen_writers == 0 && !left.left_unseen) {
      users.erase(found);
    }
  }
}

} // namespace fsdp::engine::group_users
