#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <fsdp/group.h>

#include "base/tracing.h"
#include "comm/shm/control.h"
#include "comm/shm/segment.h"

namespace fsdp::shm {

class Members;

/// The groups of one rank that stem from one another by `split`: if one fails, the rank cannot keep its promises in the
/// others.
struct Family {
  std::vector<std::weak_ptr<Members>> groups;
  int ranks_on_host; ///< those of the largest group: they share the cores
};

/// Work that goes on while a rank waits for something else, since others may be waiting for it.
class Background {
 public:
  virtual ~Background() = default;
  virtual bool pending() const = 0;
  /// Returns whether it got on.
  virtual bool advance() = 0;
};

/// The ranks of a group as one of them sees them: tells them what it does, waits for them, and finds out when one is
/// gone. Not thread safe: one thread per rank.
class Members {
 public:
  struct Place {
    int rank;
    int size;
    std::chrono::milliseconds timeout;
  };

  Members(Place place, std::shared_ptr<Segment> control, std::shared_ptr<Family> family);
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
    return family_;
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
  /// In a forked child, whose parent is the member.
  bool inherited() const;
  /// To be called once all ranks have made their Members.
  void meet();

  /// Begins an operation: throws if the group has failed, and lets the others know what this rank does.
  void begin(const Label& label);
  /// Sets a counter that others may wait for, after everything written before.
  void publish(Counter& counter, uint64_t value);

  /// Waits until `ready`, which depends on what rank `peer` publishes.
  template <typename Ready>
  void await(int peer, const Label& label, const Ready& ready) {
    if (ready()) {
      return;
    }
    const tracing::Span span("wait for rank", label.unit, peer);
    for (int i = 0; i < spins_; ++i) {
      relax_core();
      if (ready()) {
        return;
      }
    }
    await_asleep(peer, label, ready);
  }
  /// Waits until a counter of every other rank has reached `value`.
  void await_all(Counter RankSlot::*counter, uint64_t value, const Label& label);
  /// Not owned; null takes it away.
  void set_background(Background* background) {
    background_ = background;
  }

  /// Ends the group: every rank's waits and later operations throw.
  [[noreturn]] void fail(const Label& label, const std::string& what);
  /// As `fail`, without throwing.
  void mark_failed(const std::string& reason);
  bool failed() const {
    return control_->failure.load() != Control::kNone;
  }
  void throw_if_failed(const Label& label) const;

  /// Around reading memory of other ranks that goes away with them: once the group has failed, nobody starts to read.
  class Reading {
   public:
    Reading(Members& members, const Label& label);
    ~Reading();
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

   private:
    Members& members_;
  };
  /// Waits until no other rank is inside a `Reading`. After a failure, before this rank's memory goes.
  void await_readers() const;
  bool gone(int peer) const;

 private:
  static void relax_core();
  bool advance_background();
  void await_asleep(int peer, const Label& label, const std::function<bool()>& ready);
  void wake_waiting() const;
  void ring(RankSlot& slot) const;
  std::string last_words(int peer) const;
  std::string fate(int peer) const;
  int culprit(int peer) const;
  [[noreturn]] void fail_waiting(const Label& label, int peer, const std::string& what);

  Place place_;
  std::shared_ptr<Segment> segment_;
  std::shared_ptr<Family> family_;
  Control* control_;
  RankSlot* mine_;
  bool one_process_ = false;
  int spins_;
  Background* background_ = nullptr;
};

/// `reduce gradients of 'blocks.3'`
std::string describe(std::string_view operation, std::string_view unit);

} // namespace fsdp::shm
