#include "engine/group_users.h"

#include <algorithm>
#include <map>
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
  std::map<uint64_t, std::vector<const void*>>
      unseen_writers; // by number: where they change shards, see ExpectedWrites
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
bool erase_writer(Users& of_group, uint64_t number) {
  of_group.unseen_writers.erase(number);
  return of_group.unseen_writers.empty();
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

UnseenWriter begin_unseen_writes(
    const std::shared_ptr<Group>& group, std::vector<const void*> changes, const Label& label) {
  static uint64_t writers = 0;
  UnseenWriter writer{group, 0};
  ExpectedWrites expected{.certain = true, .changes = {}};
  {
    std::lock_guard lock(mutex);
    Users& of_group = users[group.get()];
    writer.number = ++writers;
    of_group.unseen_writers[writer.number] = std::move(changes);
    of_group.left_unseen = false;
    for (const auto& [number, places] : of_group.unseen_writers) {
      expected.changes.insert(expected.changes.end(), places.begin(), places.end());
    }
  }
  group->begin_unseen_writes(expected, label);
  return writer;
}

void end_unseen_writes(const UnseenWriter& writer) {
  std::unique_lock lock(mutex);
  if (erase_writer(users[writer.group.get()], writer.number)) {
    lock.unlock();
    writer.group->end_unseen_writes();
  }
}

void forget_unseen_writes(const UnseenWriter& writer) {
  std::lock_guard lock(mutex);
  Users& of_group = users[writer.group.get()];
  of_group.left_unseen = erase_writer(of_group, writer.number);
}

void forget(Group& group, Unit& unit) {
  std::lock_guard lock(mutex);
  if (auto found = users.find(&group); found != users.end()) {
    erase_reader(found->second, unit);
    const Users& left = found->second;
    if (left.readers.empty() && left.unseen_writers.empty() && !left.left_unseen) {
      users.erase(found);
    }
  }
}

} // namespace fsdp::engine::group_users
