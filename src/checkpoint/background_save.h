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
/// are there. Threads see each other's work on the disk alone: they make no collective.
class BackgroundSave {
 public:
  BackgroundSave(SaveOfRank save, std::shared_ptr<Group> group);
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;
  ~BackgroundSave();

  /// Once there is the folder. Returns when `state` may change; an error is the save's.
  static void start(const std::shared_ptr<BackgroundSave>& save, const StateOfRank& state);
  bool has_ended() const;
  /// Waits for all ranks; the path, or the Error of the first rank that has one. Collective, once; after that it says
  /// the same again.
  std::string result();

  /// Waits for what the group's ranks write in the background; its errors are left to who asks for them. Collective.
  static void settle(const std::shared_ptr<Group>& group);

  /// What is known of one after a rank has let go of it.
  struct Ending {
    bool is_settled = false; ///< all ranks have told each other how it ended
    std::string word{}; ///< of this rank
  };

 private:
  /// How far this rank is. Each of them tells the others.
  enum class State : char {
    kWriting = 'w',
    kWritten = 'p',
    kFinished = 'f', ///< of the first rank
    kGivenUp = 'o', ///< of the first rank: others have not written theirs
    kFailed = 'e',
  };

  void start(const StateOfRank& state);
  void run();
  void finish_when_all_have_written();
  bool wait_for_part(int rank);
  void become(State state, const std::string& text);
  void fail(const std::string& text);
  void end();
  std::string wait_a_while() const;
  std::string word() const;
  void cancel();
  void conclude(const std::vector<std::string>& states);
  void wait_for_end();
  static void settle(Group& group, Ending& ending, BackgroundSave* save);

  SaveOfRank save_;
  std::shared_ptr<Group> group_;
  int rank_;
  pid_t process_;
  std::chrono::steady_clock::time_point begun_;

  mutable std::mutex mutex_{};
  mutable std::condition_variable changed_{};
  State state_ = State::kWriting; // guarded by it, as are those below
  std::string text_{}; // the path, or the error
  bool is_cancelled_ = false; // the first rank waits for others no longer
  bool has_ended_ = false;
  std::thread thread_{};

  std::shared_ptr<Ending> ending_ = std::make_shared<Ending>(); // from here on, the program's thread alone
  bool is_told_ = false; // the program knows how it ended
  std::string path_{}, error_{};
};

} // namespace fsdp::disk
