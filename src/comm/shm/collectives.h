#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/group.h>

#include "comm/shm/members.h"

namespace fsdp::shm {

/// A number that differs when ranks call different collectives (FNV-1a over what they were called with).
class Fingerprint {
 public:
  template <typename... Numbers>
  Fingerprint(std::string_view kind, const Label& label, Numbers... numbers) {
    for (const std::string_view text : {kind, std::string_view(label.operation), std::string_view(label.unit)}) {
      for (const char c : text) {
        mix(static_cast<unsigned char>(c));
      }
      add(text.size());
    }
    add(numbers...);
  }

  template <typename... Numbers>
  void add(Numbers... numbers) {
    ((mix(static_cast<uint64_t>(numbers)), mix(static_cast<uint64_t>(numbers) >> 32)), ...);
  }
  uint64_t value() const {
    return value_;
  }
  /// Of a sequence that has one more.
  static uint64_t appended(uint64_t sequence, uint64_t value) {
    return (sequence ^ value) * kPrime;
  }

 private:
  void mix(uint64_t bits) {
    value_ = appended(value_, bits);
  }

  static constexpr uint64_t kPrime = 0x100000001b3;
  uint64_t value_ = 0xcbf29ce484222325;
};

/// The collectives of one rank, in order. Each has a number, the same on all ranks. A rank *posts* what the others need
/// to know about its part, *runs* its part once the others have posted theirs, and says that it has *finished* reading
/// from them. Several may be posted and not finished. Same thread safety as Members.
class Collectives final : public Errand {
 public:
  /// One numbered part of a collective; most have one part only.
  struct Part {
    uint64_t number;
    int root = -1; ///< the one rank that it depends on; -1: all
    Counter RankSlot::*counter = &RankSlot::posted; ///< it depends on this counter ...
    uint64_t value; ///< ... reaching this value
    std::function<void()> run = [] {};

    bool depends_on(int rank) const {
      return root < 0 || root == rank;
    }
    bool reached(const RankSlot& slot) const {
      return (slot.*counter).load() >= value;
    }
  };
  /// A part on its way.
  struct Step : Part {
    Step(Part part, Label label_, uint64_t fingerprint_, uint64_t history_)
        : Part(std::move(part)), label(std::move(label_)), fingerprint(fingerprint_), history(history_) {}

    Label label;
    uint64_t fingerprint, history; ///< see Post
    std::atomic<int> arrived = 0; ///< ranks below are known to have reached what it depends on
    std::atomic<bool> done = false;
  };
  using StepPointer = std::shared_ptr<Step>;

  explicit Collectives(Members& members) : members_(members) {}

  /// This rank's part of the next collective, to be filled in; then `commit`. Throws if the group has failed.
  Post& prepare(const Label& label, const Fingerprint& fingerprint);
  /// Posts what was prepared. `steps` numbers are used up, the first of which is returned.
  uint64_t commit(int steps = 1);
  /// Queues a part of what was committed; parts are queued in the order of their numbers.
  StepPointer queue(Part part);

  /// Runs the steps that can run; returns whether there were any.
  bool advance();
  bool pending() const override {
    return !queue_.empty() && !members_.failed();
  }
  bool advance(Leftovers& leftovers) override;
  /// Waits until `step` has run.
  void finish(const StepPointer& step);

  /// Memory that others read.
  struct Lent {
    std::vector<at::Tensor> tensors;
    std::shared_ptr<char> block;

    bool empty() const {
      return tensors.empty() && !block;
    }
  };
  /// Keeps it until all have finished step `number`. On any thread: the owner of a Work may go on any.
  void keep(uint64_t number, Lent lent);
  /// Lets go of what nobody reads any more.
  void release_kept();
  /// Of collectives that nobody waits for, so many may keep memory for slow readers.
  static constexpr size_t kMostKept = 8;
  /// Waits until at most `limit` collectives keep memory.
  void await_kept(size_t limit, const Label& label);
  /// Waits until all ranks have finished `step`, so that nobody reads what was lent for it.
  void await_all_finished(const Step& step);
  bool all_finished(uint64_t number) const;

  const Post& post_of(int rank, uint64_t number) const {
    return members_.slot(rank).posts[number % RankSlot::kPosts];
  }

 private:
  struct Kept {
    uint64_t number;
    Lent lent;
  };

  void await_room(const Label& label);
  void finish_first(const Label& label);
  void await_front(const Label& label);
  StepPointer front() const;
  std::optional<uint64_t> oldest_kept(size_t beyond);
  void run_front(Leftovers& leftovers);
  void abandon(const std::string& reason);
  bool arrived(Step& step);
  void check_order(const Step& step, int rank) const;

  Members& members_;
  Label label_{}; // of the collective being prepared
  uint64_t fingerprint_ = 0, history_ = 0; // of it, see Post
  uint64_t next_history_ = 0;
  uint64_t last_ = 0; // number of the last collective posted
  uint64_t room_until_ = RankSlot::kPosts - 1;
  std::deque<StepPointer> queue_;
  std::mutex kept_mutex_; // of the next
  std::deque<Kept> kept_;
};

} // namespace fsdp::shm
