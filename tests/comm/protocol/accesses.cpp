#include "comm/protocol/exploration.h"

#include <algorithm>

namespace fsdp::testing {

using shm::Control;
using shm::RankSlot;
using watched::Kind;
using watched::Verdict;

Place Explorer::place_of(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  if (is_of_dead(address)) {
    return Place::kStep;
  }
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (at < regions_[i].begin || at >= regions_[i].begin + regions_[i].bytes) {
      continue;
    }
    if (i > 0) {
      return Place::kStep;
    }
    const auto found = control_.find(at);
    if (found.rank < 0) {
      return found.offset < offsetof(Control, reason) ? Place::kStep : Place::kQuiet;
    }
    if (found.offset >= offset_of(&RankSlot::posts)) {
      return Place::kPost;
    }
    if (found.offset >= offset_of(&RankSlot::doing)) {
      return Place::kQuiet; // words for people
    }
    if (found.offset == offset_of(&RankSlot::heard)) {
      return Place::kElsewhere; // counts rings, as the bell does
    }
    if (found.offset == offset_of(&RankSlot::bell)) {
      return Place::kBell;
    }
    const bool of_sleep =
        found.offset == offset_of(&RankSlot::wakes_for) || found.offset == offset_of(&RankSlot::waits_for);
    return of_sleep && !options_.wake_ups ? Place::kQuiet : Place::kStep;
  }
  return Place::kElsewhere;
}

// A rank that reads what only it writes meets nobody.
bool Explorer::is_step(const void* address, size_t bytes, Kind kind) {
  Cell& cell = cells_[address];
  const unsigned me = 1U << self().rank, writers = cell.writers;
  cell.bytes = std::max(cell.bytes, std::min(bytes, sizeof(uint64_t)));
  (kind == Kind::kRead ? cell.readers : cell.writers) |= me;
  const unsigned users = cell.readers | cell.writers;
  if (is_of_dead(address) || (cell.writers != 0 && (users & (users - 1)) != 0)) {
    learned_ = contended_.insert(address).second || cell.writers != writers || learned_;
    return kind == Kind::kWrite || cell.writers != me;
  }
  return false;
}

Verdict Explorer::verdict(const void* address, Kind kind) const {
  const Mistake& mistake = options_.mistake;
  const Fiber& fiber = *fibers_[static_cast<size_t>(current_)];
  if (mistake.kind == Mistake::Kind::kNone || fiber.rank != mistake.rank || mode_ != Mode::kExploring) {
    return Verdict::kAsWritten;
  }
  const auto found = control_.find(address);
  if (mistake.kind == Mistake::Kind::kSleepsUnannounced) {
    const bool says_so = kind == Kind::kWrite && found.offset == offset_of(&RankSlot::wakes_for);
    return says_so ? Verdict::kDrop : Verdict::kAsWritten;
  }
  if (mistake.counter == nullptr || found.rank < 0 || found.offset != offset_of(mistake.counter)) {
    return Verdict::kAsWritten;
  }
  if (mistake.kind == Mistake::Kind::kNeverSet && kind == Kind::kWrite && found.rank == fiber.rank) {
    return Verdict::kDrop;
  }
  const bool of_other = found.rank != fiber.rank && found.rank < options_.ranks;
  return mistake.kind == Mistake::Kind::kNotAwaited && kind == Kind::kRead && of_other ? Verdict::kReadMost
                                                                                       : Verdict::kAsWritten;
}

bool Explorer::looked_at(const void* address, Kind kind) {
  auto& before = self().looked_at;
  if (kind == Kind::kWrite || options_.wake_ups) {
    before.clear();
    return false;
  }
  if (std::find(before.begin(), before.end(), address) != before.end()) {
    return true;
  }
  before.push_back(address);
  return false;
}

Verdict Explorer::before_atomic(const void* address, size_t bytes, Kind kind) {
  const bool looks_again = (self().spins || self().roused) && kind == Kind::kRead;
  if (mode_ != Mode::kExploring || (self().spins && kind == Kind::kRead) || place_of(address) != Place::kStep) {
    return Verdict::kAsWritten;
  }
  if (is_step(address, bytes, kind) && !looks_again && !looked_at(address, kind)) {
    about_to_access(address, kind);
  }
  return verdict(address, kind);
}

void Explorer::about_to_access(const void* memory, Kind kind) {
  if (mode_ != Mode::kExploring) {
    return;
  }
  self().pending = memory;
  self().pending_kind = kind;
  yield();
}

void Explorer::after_read(const void* address, uint64_t value) {
  Fiber& fiber = self();
  if (fiber.spins) {
    const auto found = control_.find(address);
    if (found.offset != offset_of(&RankSlot::bell)) {
      return;
    }
  }
  const Place place = place_of(address);
  if (place == Place::kBell) {
    const auto* bell = static_cast<const std::atomic<uint32_t>*>(address);
    if (control_.find(address).rank == fiber.rank) {
      fiber.bell = bell;
      fiber.bell_seen = static_cast<uint32_t>(value);
    }
    return;
  }
  if (place == Place::kStep) {
    fiber.before_read = fiber.history;
    fiber.last_read = mix(mix(7, address), value);
    if (contended_.count(address) != 0) {
      fiber.history = mix(fiber.history, fiber.last_read);
    }
  }
}

bool Explorer::sees_end_of(int rank) {
  const void* address = &dead[static_cast<size_t>(rank)];
  before_atomic(address, 1, Kind::kRead);
  const bool ignored = options_.mistake.kind == Mistake::Kind::kDeathIgnored;
  const bool ended = !ignored && dead[static_cast<size_t>(rank)] != 0;
  after_read(address, ended);
  return ended;
}

void Explorer::after_write(const void* address, uint64_t value) {
  const Place place = place_of(address);
  Fiber& fiber = self();
  if (place == Place::kElsewhere || place == Place::kBell) {
    return;
  }
  fiber.spins = false;
  const auto found = control_.find(address);
  const bool falls_asleep = found.rank == fiber.rank && found.offset == offset_of(&RankSlot::wakes_for);
  if (place == Place::kStep) {
    fiber.history = mix(mix(fiber.history, address), 3);
    fiber.awaits = fiber.awaits && falls_asleep; // else it has done more than to wait
    if (contended_.count(address) != 0) {
      something_happened();
    }
  }
  if (falls_asleep && !options_.wake_ups) {
    fiber.roused = value != static_cast<uint32_t>(RankSlot::kNobody);
    if (fiber.awaits && !fiber.roused) { // however the wait went, only what was seen at its end is known
      fiber.history = mix(fiber.before_await, fiber.last_read);
      fiber.awaits = false;
      fiber.bell = nullptr;
    }
  }
  fiber.after_store = fiber.history;
}

void Explorer::before_plain_write(const void* address) {
  const Mistake& mistake = options_.mistake;
  if (mistake.kind != Mistake::Kind::kSetTooEarly || mode_ != Mode::kExploring || self().rank != mistake.rank) {
    return;
  }
  Fiber& fiber = self();
  if (place_of(address) == Place::kPost && !std::exchange(fiber.posts, true)) {
    const auto* control = reinterpret_cast<const Control*>(control_.base);
    auto& counter = const_cast<Control*>(control)->ranks[fiber.rank].*mistake.counter;
    about_to_access(&counter, Kind::kWrite);
    counter.fetch_add(1);
    pause();
  }
}

void Explorer::relax() {
  Fiber& fiber = self();
  if (!fiber.spins && !fiber.awaits && !fiber.keeps_all) {
    fiber.before_await = fiber.before_read;
    fiber.awaits = true;
  }
  fiber.spins = true;
}

void Explorer::sleep(const std::atomic<uint32_t>& word, uint32_t seen) {
  Fiber& fiber = self();
  fiber.bell = &word;
  fiber.bell_seen = seen;
  fiber.history = fiber.keeps_all ? fiber.history : fiber.after_store;
  fiber.looked_at.clear();
  if (mode_ == Mode::kExploring) {
    fiber.pending = &word;
    fiber.pending_kind = Kind::kRead;
  }
  fiber.status = Fiber::Status::kAsleep;
  yield();
}

// Looks again after a while, as long as nothing has happened without end.
void Explorer::nap() {
  Fiber& fiber = self();
  if (fiber.spins) {
    constexpr int kEnough = 10'000;
    if (++fiber.idle > kEnough) {
      violate("rank " + std::to_string(fiber.rank) + " looks for something without end");
    }
    return;
  }
  fiber.history = mix(fiber.after_store, 13);
  fiber.bell = nullptr;
  fiber.polls = true;
  fiber.pending = nullptr;
  fiber.status = Fiber::Status::kAsleep;
  yield();
  fiber.polls = false;
}

namespace {
bool watching(const void* address) {
  return active != nullptr && !inside && active->in_fiber() && active->may_be_shared(address);
}
} // namespace

namespace watched {

Verdict before_atomic(const void* address, size_t bytes, Kind kind) {
  if (!watching(address)) {
    return Verdict::kAsWritten;
  }
  const Inside guard;
  return active->before_atomic(address, bytes, kind);
}
void after_read(const void* address, uint64_t value) {
  if (watching(address)) {
    const Inside guard;
    active->after_read(address, value);
  }
}
void after_write(const void* address, uint64_t value) {
  if (watching(address)) {
    const Inside guard;
    active->after_write(address, value);
  }
}
void before_plain_write(const void* address) {
  if (active != nullptr && active->plants_early_writes() && watching(address)) {
    const Inside guard;
    active->before_plain_write(address);
  }
}
void sleep(const std::atomic<uint32_t>& word, uint32_t seen) {
  const Inside guard;
  active->sleep(word, seen);
}
void relax() {
  const Inside guard;
  active->relax();
}
void nap() {
  const Inside guard;
  active->nap();
}
int rank() {
  return active != nullptr && active->in_fiber() ? active->self().rank : -1;
}
bool sees_end_of(int rank) {
  const Inside guard;
  return active->sees_end_of(rank);
}
void add_region(const char* begin, size_t bytes) {
  const Inside guard;
  active->add_region(begin, bytes);
}

} // namespace watched

} // namespace fsdp::testing
