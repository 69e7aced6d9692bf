#pragma once

#include <cstdint>
#include <future>
#include <optional>
#include <string>

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}

namespace fsdp::adapter {

/// For the one who reads an error at last; what ranks tell each other is without it.
inline constexpr const char* kStartAgain = "; a failed job has to be started again on all ranks";

/// Where ranks tell each other, through the store, that they give up and why, and which collective they have waited for
/// for long. The store may be served by a process that is stopped and then never answers, so no caller waits for it
/// without an end: detached threads talk to it. Nothing is told and nothing heard without a store. Not thread safe.
class NoticeBoard {
 public:
  /// What a rank waits for: its number, which ranks in step have in common, and its name.
  struct Place {
    int64_t number;
    std::string name;
  };
  /// Before the first collective.
  static Place joining() {
    return {.number = -1, .name = "the making of the group"};
  }

  /// In a part of the group's store, which may be null.
  NoticeBoard(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);
  ~NoticeBoard();
  NoticeBoard(const NoticeBoard&) = delete;
  NoticeBoard& operator=(const NoticeBoard&) = delete;

  /// This rank gives up. Only the first reason of the first rank counts.
  void announce(const std::string& reason);
  /// This rank has waited at `place` for some time; from now on it listens whether another gives up.
  void wait_at(const Place& place);
  /// What another rank gave as its reason, if it was heard since `wait_at`.
  std::optional<std::string> heard() const;
  /// The wait is over.
  void stop_listening();
  /// What the board says about the other ranks, for one of them that failed at `place`. Takes five seconds at
  /// most, where the store does not answer.
  std::string ask(const Place& place) const;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  int size_;
  std::promise<void> over_; // the wait; what listens may outlive this
  std::shared_future<std::string> reason_; // that is heard, or an empty text; valid while this rank waits
  bool announced_ = false;
};

} // namespace fsdp::adapter
