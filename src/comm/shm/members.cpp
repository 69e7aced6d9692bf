#include "comm/shm/members.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <unistd.h>

#include <fsdp/error.h>

#include "base/caller.h"
#include "base/check.h"
#include "base/this_process.h"
#include "comm/process.h"
#include "comm/within_limit.h"
#include "comm/words.h"

namespace fsdp::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How long a death, an abort or a missed bell may go unnoticed.
constexpr milliseconds kNap{20};
// A shorter wait is over before a user who presses Ctrl-C could be said to wait for it: the program takes that
// afterwards, and the ranks stay together.
constexpr milliseconds kLongWait{1000};
// As long as other groups have something to do: their bells are not heard in this one's sleep.
constexpr milliseconds kShortNap{1};
// Of a nap and a look around, as far as it counts: beyond that this process was stopped, as may be the whole job
// (docker pause, a scheduler), and nobody is late by that.
constexpr milliseconds kLongestRound{1000};

std::string in_unit(const Label& label) {
  return label.unit.empty() ? "" : " in unit '" + label.unit + "'";
}

// Says for the length of a scope whom this rank waits for and whose changes have to wake it.
class Asleep {
 public:
  Asleep(RankSlot& slot, int peer, bool wake_for_anybody) : slot_(slot) {
    slot_.heard.store(0);
    slot_.waits_for.store(peer + 1);
    slot_.wakes_for.store(wake_for_anybody ? RankSlot::kAnybody : peer + 1);
  }
  ~Asleep() { // in this order: whoever does not ring because of the second sees the first
    slot_.waits_for.store(RankSlot::kNobody);
    slot_.wakes_for.store(RankSlot::kNobody);
  }
  Asleep(const Asleep&) = delete;
  Asleep& operator=(const Asleep&) = delete;

 private:
  RankSlot& slot_;
};

} // namespace

void Family::add(const std::shared_ptr<Members>& group) {
  const std::scoped_lock lock(mutex_);
  groups_.push_back(group);
}

std::vector<std::shared_ptr<Members>> Family::groups() const {
  const std::scoped_lock lock(mutex_);
  std::vector<std::shared_ptr<Members>> present;
  for (const auto& group : groups_) {
    if (auto here = group.lock()) {
      present.push_back(std::move(here));
    }
  }
  return present;
}

Members::Members(Place place, std::shared_ptr<Segment> control)
    : place_(std::move(place)),
      segment_(std::move(control)),
      control_(reinterpret_cast<Control*>(segment_->writable())),
      mine_(&control_->ranks[rank()]),
      process_(this_process()),
      spins_(looks_before_sleep(family()->ranks_on_host)),
      watched_(static_cast<size_t>(size())) {
  place_.timeout = bounded(place_.timeout);
  mine_->pid = process_;
  mine_->started = process_start(process_).value_or(0);
}

Members::~Members() {
  if (getpid() == process_) {
    mine_->left.store(1);
    wake_waiting();
  }
}

bool Members::inherited() const {
  return this_process() != process_;
}

void Members::meet() {
  one_process_ = true;
  for (int r = 0; r < size(); ++r) {
    one_process_ = one_process_ && slot(r).pid == process_;
  }
  errands_ = Errands::of_rank(/*is_thread=*/one_process_);
}

void Members::begin(const Label& label) {
  throw_if_failed(label);
  mine_->doing.store(label);
}

void Members::publish(Counter& counter, uint64_t value) {
  counter.store(value); // sequentially consistent: see [Note: no lost wake-up]
  wake_waiting();
}

// [Note: no lost wake-up] A waiter says that it sleeps, then looks once more. A publisher changes the counter, then
// looks for sleepers. All four are sequentially consistent, so at least one sees the other.
void Members::wake_waiting() const {
  for (int r = 0; r < size(); ++r) {
    const int32_t whom = slot(r).wakes_for.load();
    if (whom == RankSlot::kAnybody || whom == rank() + 1) {
      ring(slot(r));
    }
  }
}

void Members::ring(RankSlot& slot) const {
  slot.bell.fetch_add(1);
  futex_wake_all(slot.bell);
}

void Members::set_errand(Errand* errand) {
  errand ? errands_->add(*errand) : errands_->remove(*errand_);
  errand_ = errand;
}

void Members::await_asleep(int peer, const Label& label, const Come& come) {
  auto begin = steady_clock::now();
  auto last = begin;
  Asleep asleep(*mine_, peer, errands_->pending(errand_));
  while (true) {
    const uint32_t bell = mine_->bell.load();
    if (come(peer)) {
      return;
    }
    mine_->heard.store(bell + 1);
    if (errands_->advance(errand_)) {
      continue;
    }
    throw_if_failed(label);
    check_presence(label, come);
    const auto now = steady_clock::now();
    begin += std::max<steady_clock::duration>(now - last - kLongestRound, {});
    last = now;
    const auto waited = now - begin;
    if (waited >= kLongWait) {
      throw_if_interrupted(peer, label);
    }
    if (waited >= place_.timeout) {
      time_is_up(peer, label);
    }
    futex_wait(mine_->bell, bell, errands_->others_pending(errand_) ? kShortNap : kNap);
  }
}

// Who is gone cannot come any more, unless it came just before.
void Members::check_presence(const Label& label, const Come& come) {
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && !come(r) && gone(r) && !come(r)) {
      throw_if_failed(label); // who failed said why before it left
      fail_waiting(label, r, fate(r));
    }
  }
}

// What it was waiting for will not be done by this rank any more.
void Members::throw_if_interrupted(int peer, const Label& label) {
  if (const auto interruption = callers_interruption()) {
    mark_failed(phrase(
        "[{}] rank {} was interrupted while it waited for rank {}{}", label.operation, rank(), peer, in_unit(label)));
    std::rethrow_exception(interruption);
  }
}

void Members::time_is_up(int peer, const Label& label) {
  const int silent = culprit(peer);
  fail_waiting(
      label,
      silent,
      phrase(
          "rank {} gave no sign for {} (it is in {}). If it was only computing, raise FSDP_TIMEOUT or "
          "InitOptions::timeout; else look at its output",
          silent,
          in_seconds(place_.timeout),
          last_words(silent)));
}

bool Members::gone(int peer) const {
  RankSlot& other = slot(peer);
  if (other.left.load() != 0) {
    return true;
  }
  if (other.pid == process_) {
    return false; // a thread that ends leaves first
  }
  auto& watched = watched_[static_cast<size_t>(peer)];
  watched = watched ? watched : WatchedProcess::of(other.pid, other.started);
  return watched->ended();
}

std::string Members::last_words(int peer) const {
  const std::string operation = slot(peer).doing.operation.load();
  return operation.empty() ? "no operation yet" : describe(operation, slot(peer).doing.unit.load());
}

std::string Members::fate(int peer) const {
  const bool left = slot(peer).left.load() != 0;
  return phrase(
      "rank {}{} (its last operation: {})", peer, left ? " has left the group" : " has died", last_words(peer));
}

// Who holds everybody up: the awaited rank may itself be waiting for another.
int Members::culprit(int peer) const {
  for (int hops = 0; hops < size(); ++hops) {
    const int32_t next = slot(peer).waits_for.load();
    if (next <= 0 || next - 1 == rank()) {
      break;
    }
    peer = next - 1;
  }
  return peer;
}

void Members::fail_waiting(const Label& label, int peer, const std::string& what) {
  fail(label, phrase("rank {} waited for rank {}{}: {}", rank(), peer, in_unit(label), what));
}

void Members::fail(const Label& label, const std::string& what) {
  const auto message = phrase("[{}] {}", label.operation, what);
  mark_failed(message);
  throw CommError(message);
}

void Members::mark_failed(const std::string& reason) {
  if (getpid() != process_) {
    return;
  }
  uint32_t none = Control::kNone;
  if (!control_->failure.compare_exchange_strong(none, Control::kBeingWritten)) {
    return;
  }
  control_->failed_rank.store(rank());
  control_->reason.store(reason.substr(0, sizeof(control_->reason) - 1)); // its beginning tells most
  control_->failure.store(Control::kWritten);
  for (int r = 0; r < size(); ++r) {
    ring(slot(r));
  }
  fail_family(reason);
}

void Members::fail_family(const std::string& reason) const {
  for (const auto& group : family()->groups()) {
    if (group.get() != this) {
      group->mark_failed(reason);
    }
  }
}

void Members::throw_if_failed(const Label& label) const {
  FSDP_CHECK(
      !inherited(),
      "[{}] a forked child cannot take its parent's place in a group; start a process of its own (spawn)",
      label.operation);
  if (!failed()) {
    return;
  }
  for (int i = 0; i < 100'000 && control_->failure.load() == Control::kBeingWritten; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(100)); // its writer may have died meanwhile
  }
  const std::string reason = control_->reason.load();
  fail_family(reason); // also groups that the rank which failed is not in
  throw CommError(phrase(
      "[{}] rank {} was stopped{} by rank {}: {}",
      label.operation,
      rank(),
      in_unit(label),
      control_->failed_rank.load(),
      reason));
}

void Members::await_readers() const {
  const auto deadline = steady_clock::now() + place_.timeout;
  for (int r = 0; r < size(); ++r) {
    while (r != rank() && slot(r).reading.load() != 0 && !gone(r) && steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
  }
}

} // namespace fsdp::shm
