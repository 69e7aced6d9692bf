#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>

#include <fsdp/group.h>

#include "checkpoint/save_of_rank.h"

namespace fsdp::disk {

/// A rank's part of a checkpoint, written by a thread of its own; the first rank's makes the checkpoint once all parts
/// are there. Threads see each other's work on the disk alone: they make no collective. The last one of each group is
/// kept, whoever lets go of it, so that the group's next save or load knows of it.
class BackgroundSave {
 public:
  BackgroundSave(SaveOfRank save, std::shared_ptr<Group> group);
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  /// Once there is the folder. Returns when `state` may change; an error is the save's.
  static void start(const std::shared_ptr<BackgroundSave>& save, const StateOfRank& state);
  bool has_ended() const;
  /// Waits for all ranks; the path, or the Error of the first rank that has one. Collective, once; after that it says
  /// the same again.
  std::string result();
  /// Nobody is going to ask for the result: waits for what is written here, and on the first rank for a while for the
  /// others. A forked child has nothing to wait for.
  void let_go();

  /// Waits for what the group's ranks write in the background; its errors are left to who asks for them. Collective.
  static void settle(const std::shared_ptr<Group>& group);
  /// An Error if this rank is, with another group, writing into the run's folder.
  static void expect_settled(const std::string& run, const char* operation);
  /// For what this process writes.
  static void wait_for_all();

 private:
  /// How far this rank is. Each of them tells the others.
  enum class State : char {
    kWriting = 'w',
    kWritten = 'p',
    kFinishing = 'd', ///< the first rank makes the checkpoint
    kFinished = 'f', ///< likewise, has made it
    kGivenUp = 'o', ///< likewise: others have not written theirs
    kFailed = 'e',
  };
  using Clock = std::chrono::steady_clock;

  void start(const StateOfRank& state);
  void run();
  void finish_when_all_have_written();
  bool wait_for_part(int rank);
  void become(State state, const std::string& text);
  void fail(const std::string& text);
  void end();

  void settle(Group& group);
  std::string wait_a_while() const;
  void cancel();
  void conclude(const std::vector<std::string>& states);
  void wait_for_end();
  void warn_of_error();

  SaveOfRank save_;
  std::shared_ptr<Group> group_; // until it is let go of
  const int rank_, ranks_;
  const int rank_of_job_;
  const pid_t process_;
  const Clock::time_point begun_ = Clock::now();

  mutable std::mutex mutex_{};
  mutable std::condition_variable changed_{};
  State state_ = State::kWriting; // guarded by it, as are those below
  std::string text_{}; // the path, or the error
  Clock::time_point written_{};
  bool is_cancelled_ = false; // the first rank waits for others no longer
  bool has_ended_ = false;
  bool is_settled_ = false; // all ranks have told each other how it ended
  bool is_told_ = false; // the program knows
  std::string path_{}, error_{};

  std::mutex joining_{};
  std::thread thread_{}; // guarded by it
};

} // namespace fsdp::disk
