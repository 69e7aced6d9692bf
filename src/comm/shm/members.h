#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <fsdp/group.h>

#include "base/tracing.h"
#include "comm/errands.h"
#include "comm/process.h"
#include "comm/shm/control.h"
#include "comm/shm/futex.h"
#include "comm/shm/segment.h"

namespace fsdp::shm {

class Members;

/// The groups of one rank that stem from one another by `split`: if one fails, the rank cannot keep its promises in the
/// others.
class Family {
 public:
  void add(const std::shared_ptr<Members>& group);
  /// Those that are still there.
  std::vector<std::shared_ptr<Members>> groups() const;

  int ranks_on_host; ///< those of the largest group: they share the cores

 private:
  mutable std::mutex mutex_; // a group may be aborted on any thread
  std::vector<std::weak_ptr<Members>> groups_;
};

/// The ranks of a group as one of them sees them: tells them what it does, waits for them, and finds out when one is
/// gone. Not thread safe: one thread per rank.
class Members {
 public:
  struct Place {
    int rank;
    int size;
    std::chrono::milliseconds timeout;
    std::shared_ptr<Family> family; ///< that fails together
  };

  Members(Place place, std::shared_ptr<Segment> control);
  /// Tells the others that this rank has left.
  ~Members();
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  int rank() const {
    return place_.rank;
  }
  int size() const {
    return place_.size;
  }
  const Place& place() const {
    return place_;
  }
  const std::shared_ptr<Family>& family() const {
    return place_.family;
  }
  RankSlot& slot(int rank) const {
    return control_->ranks[rank];
  }
  RankSlot& mine() const {
    return *mine_;
  }
  /// Ranks are threads of one process: each can read all memory of the others.
  bool one_process() const {
    return one_process_;
  }
  /// In a forked child, whose parent is the member: what the ranks share is not there, see [Note: forked children].
  bool inherited() const;
  /// To be called once all ranks have made their Members.
  void meet();

  /// Begins an operation: throws if the group has failed, and lets the others know what this rank does.
  void begin(const Label& label);
  /// Sets a counter that others may wait for, after everything written before.
  void publish(Counter& counter, uint64_t value);

  /// Waits until rank `peer` has `come`, which depends on what it publishes. `come(r)` tells of every other rank; one
  /// that is gone and has not ends the wait too, since more is waited for than the next.
  template <typename Come>
  void await(int peer, const Label& label, const Come& come) {
    if (come(peer)) {
      return;
    }
    const tracing::Span span("wait for rank", label.unit, peer);
    for (int i = 0; i < spins_; ++i) {
      relax();
      if (come(peer)) {
        return;
      }
    }
    await_asleep(peer, label, come);
  }
  /// Whether a rank sleeps until this one does something that it has not done yet.
  bool waits_for_this_rank(int other) const {
    const RankSlot& slot = control_->ranks[other];
    const uint32_t heard = slot.heard.load(); // before and after: all of it is of one wait
    return slot.waits_for.load() == rank() + 1 && heard == slot.bell.load() + 1 && heard == slot.heard.load();
  }
  /// Waits until all other ranks have `come`.
  template <typename Come>
  void await_all(const Label& label, const Come& come) {
    for (int r = 0; r < size(); ++r) {
      if (r != rank()) {
        await(r, label, come);
      }
    }
  }
  /// Waits until a counter of every other rank has reached `value`.
  void await_all(Counter RankSlot::*counter, uint64_t value, const Label& label) {
    await_all(label, [&](int r) { return (slot(r).*counter).load() >= value; });
  }

  /// What this rank does in this group and, meanwhile, in its others.
  Errands& errands() const {
    return *errands_;
  }
  /// This group's part of them. Not owned; null takes it away.
  void set_errand(Errand* errand);

  /// Ends the group: every rank's waits and later operations throw.
  [[noreturn]] void fail(const Label& label, const std::string& what);
  /// As `fail`, without throwing.
  void mark_failed(const std::string& reason);
  /// True in a forked child too.
  bool failed() const {
    return inherited() || control_->failure.load() != Control::kNone;
  }
  void throw_if_failed(const Label& label) const;

  /// Around reading memory of other ranks that goes away with them: once the group has failed nobody starts to read,
  /// and what was read meanwhile is an error.
  template <typename Read>
  void read_others(const Label& label, const Read& read) {
    {
      const Reading reading(*mine_);
      throw_if_failed(label);
      read();
    }
    throw_if_failed(label);
  }
  /// Waits until no other rank reads, but no longer than for anything else. After a failure, before this rank's memory
  /// goes.
  void await_readers() const;

 private:
  // Sequentially consistent, as the failure is, for the same reason as in [Note: no lost wake-up]; and what was read is
  // looked at no later than the failure.
  struct Reading {
    explicit Reading(RankSlot& of) : slot(of) {
      slot.reading.store(1);
    }
    ~Reading() {
      slot.reading.store(0);
    }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

    RankSlot& slot;
  };

  bool gone(int peer) const;
  using Come = std::function<bool(int rank)>;
  void await_asleep(int peer, const Label& label, const Come& come);
  void check_presence(const Label& label, const Come& come);
  void throw_if_interrupted(int peer, const Label& label);
  [[noreturn]] void time_is_up(int peer, const Label& label);
  void wake_waiting() const;
  void ring(RankSlot& slot) const;
  std::string last_words(int peer) const;
  std::string fate(int peer) const;
  int culprit(int peer) const;
  void fail_family(const std::string& reason) const;
  [[noreturn]] void fail_waiting(const Label& label, int peer, const std::string& what);

  Place place_;
  std::shared_ptr<Segment> segment_;
  Control* control_;
  RankSlot* mine_;
  pid_t process_;
  bool one_process_ = false;
  int spins_;
  std::shared_ptr<Errands> errands_;
  Errand* errand_ = nullptr;
  mutable std::vector<std::shared_ptr<const WatchedProcess>> watched_; // by rank; null until it was waited for
};

} // namespace fsdp::shm
