#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace fsdp {

/// What a rank has begun in one of its groups and does as soon as others have come so far, whatever it waits for
/// meanwhile: others may be waiting for it.
class Errand {
 public:
  /// What was needed for it and may go. Tensors may need the program's own lock to go, so nothing else is held then.
  using Leftovers = std::vector<std::function<void()>>;

  virtual ~Errand() = default;
  // Both are called with the mutex of the rank's errands held.
  virtual bool pending() const = 0;
  /// Returns whether it got on. If that throws, the group has failed, and nothing is pending any more.
  virtual bool advance(Leftovers& leftovers) = 0;
};

/// The errands of one rank in all its groups. Thread safe, so that a thread may wait in one group while another uses
/// the next.
class Errands {
 public:
  /// Of the calling thread, if ranks are threads, else of the process.
  static std::shared_ptr<Errands> of_rank(bool is_thread);

  /// Not owned.
  void add(Errand& errand);
  void remove(Errand& errand);
  bool pending(const Errand* own) const;
  bool others_pending(const Errand* own) const;
  /// Does what can be done; returns whether anything got on. Throws what `own` throws: the others' errors are told
  /// where those groups are used.
  bool advance(const Errand* own);
  /// For a rank that waits outside of such groups: does what can be done of all that is begun on this thread or in this
  /// process. Returns whether something is left.
  static bool advance_all() {
    return in_process_.load(std::memory_order_relaxed) > 0 && advance_of_process();
  }

  /// Held while an errand is given, looked at or done.
  std::mutex& mutex() const {
    return mutex_;
  }

 private:
  static bool advance_of_process();

  static inline std::atomic<int> in_process_ = 0; // of all ranks; most programs that wait elsewhere have none

  mutable std::mutex mutex_;
  std::vector<Errand*> all_;
};

} // namespace fsdp
