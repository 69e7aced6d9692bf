#include "checkpoint/background_save.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <utility>

#include <fsdp/error.h>

#include "base/caller.h"
#include "base/check.h"
#include "base/log.h"

namespace fsdp::disk {

namespace {

using namespace std::chrono_literals;

const Label kLabel{"save_async", ""};
constexpr auto kBetweenLooks = 20ms; // at the files of other ranks
constexpr auto kBetweenWords = 1s; // while ranks wait: none waits longer for another's word, however long writing takes
// Other hosts may see a new file a minute late.
constexpr int kMostWords = 120; // with which ranks that have written wait for the first one to see it
constexpr auto kPatience = 60s; // of a first rank that nobody waits for

/// The last of each group. One that had none has no entry, on all its ranks.
class LastSaves {
 public:
  using Save = std::shared_ptr<BackgroundSave>;

  /// Returns those that nobody needs any more.
  std::vector<Save> set(const std::shared_ptr<Group>& group, Save save) {
    const std::lock_guard lock(mutex_);
    std::vector<Save> old;
    std::erase_if(all_, [&](auto& each) {
      const bool goes = each.first.expired() || each.first.lock() == group;
      if (goes) {
        old.push_back(std::move(each.second));
      }
      return goes;
    });
    all_.emplace_back(group, std::move(save));
    return old;
  }
  /// Null if it had none.
  Save of(const std::shared_ptr<Group>& group) const {
    const std::lock_guard lock(mutex_);
    const auto last =
        std::find_if(all_.begin(), all_.end(), [&](const auto& each) { return each.first.lock() == group; });
    return last == all_.end() ? nullptr : last->second;
  }
  std::vector<Save> all() const {
    const std::lock_guard lock(mutex_);
    std::vector<Save> all;
    for (const auto& [group, save] : all_) {
      all.push_back(save);
    }
    return all;
  }

 private:
  mutable std::mutex mutex_{};
  std::vector<std::pair<std::weak_ptr<Group>, Save>> all_{};
};

// Only this one waits for saves at its end: a child that it forks may have got locks that nobody will unlock.
std::atomic<pid_t> saving_process = 0;

LastSaves& last_saves() {
  static auto* saves = new LastSaves; // as long as any thread
  return *saves;
}

void throw_if_interrupted(Group& group) {
  if (const auto interruption = callers_interruption()) {
    group.abort(
        "[save_async] rank " + std::to_string(group.rank()) + " was interrupted while it waited for a checkpoint");
    std::rethrow_exception(interruption);
  }
}

/// Signals are for the program's own threads.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;
  ~NoSignals() {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t before_{};
};

} // namespace

BackgroundSave::BackgroundSave(SaveOfRank save, std::shared_ptr<Group> group)
    : save_(std::move(save)),
      group_(std::move(group)),
      rank_(group_->rank()),
      ranks_(group_->size()),
      rank_of_job_(log::rank()),
      process_(getpid()) {}

void BackgroundSave::start(const std::shared_ptr<BackgroundSave>& save, const StateOfRank& state) {
  static const bool at_exit = [] { return std::atexit(&BackgroundSave::wait_for_all) == 0; }();
  static_cast<void>(at_exit);
  saving_process = getpid();
  for (const auto& old : last_saves().set(save->group_, save)) {
    old->wait_for_end(); // all of them have settled, but for those of a group that is gone
  }
  save->start(state);
}

void BackgroundSave::start(const StateOfRank& state) {
  try {
    save_.begin(state);
    save_.stage();
    const NoSignals no_signals;
    const std::lock_guard lock(joining_);
    thread_ = std::thread([this] {
      log::set_thread_rank(rank_of_job_);
      run();
    });
  } catch (const std::exception& error) {
    fail(error.what());
    end();
  }
}

void BackgroundSave::run() {
  try {
    save_.write(/*with_bar=*/false);
    become(State::kWritten, "");
    if (rank_ == 0) {
      finish_when_all_have_written();
    }
  } catch (const std::exception& error) {
    fail(error.what());
  } catch (...) {
    fail("");
  }
  end();
}

void BackgroundSave::finish_when_all_have_written() {
  for (int rank = 1; rank < ranks_; ++rank) {
    if (!wait_for_part(rank)) {
      become(State::kGivenUp, "");
      return;
    }
  }
  become(State::kFinishing, "");
  become(State::kFinished, save_.finish());
}

bool BackgroundSave::wait_for_part(int rank) {
  for (;;) {
    const auto part = save_.part_of(rank);
    if (part != SaveOfRank::Part::kUnwritten) {
      return part == SaveOfRank::Part::kWritten;
    }
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, kBetweenLooks, [&] { return is_cancelled_; })) {
      return false;
    }
  }
}

void BackgroundSave::become(State state, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (state_ == State::kWriting) {
    written_ = Clock::now();
  }
  state_ = state;
  text_ = text;
  changed_.notify_all();
}

// The others hear of it when nothing is written here any more.
void BackgroundSave::fail(const std::string& text) {
  save_.note_failure();
  become(State::kFailed, text.empty() ? "an error without a text" : text);
}

void BackgroundSave::end() {
  const std::lock_guard lock(mutex_);
  has_ended_ = true;
  changed_.notify_all();
}

bool BackgroundSave::has_ended() const {
  const std::lock_guard lock(mutex_);
  return has_ended_ || is_settled_; // the thread has nothing left to do
}

std::string BackgroundSave::result() {
  settle(*group_);
  const std::lock_guard lock(mutex_);
  is_told_ = true;
  if (!error_.empty()) {
    throw Error(error_);
  }
  return path_;
}

void BackgroundSave::settle(const std::shared_ptr<Group>& group) {
  if (const auto last = last_saves().of(group)) {
    last->settle(*group);
  }
}

void BackgroundSave::settle(Group& group) {
  {
    const std::lock_guard lock(mutex_);
    if (is_settled_) {
      return;
    }
  }
  for (int words = 0;;) {
    throw_if_interrupted(group);
    const auto states = group.exchange(wait_a_while(), kLabel);
    const auto any_is = [&](State state) {
      return std::any_of(
          states.begin(), states.end(), [&](const auto& each) { return each[0] == static_cast<char>(state); });
    };
    const bool waits_for_parts =
        states[0][0] == static_cast<char>(State::kWritten) && !any_is(State::kWriting) && !any_is(State::kFailed);
    if (!any_is(State::kWriting) && !any_is(State::kFinishing) && !waits_for_parts) {
      conclude(states);
      return;
    }
    if (waits_for_parts && ++words == kMostWords) {
      cancel();
    }
  }
}

std::string BackgroundSave::wait_a_while() const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kBetweenWords, [&] { return has_ended_; });
  return static_cast<char>(state_) + text_;
}

void BackgroundSave::cancel() {
  const std::lock_guard lock(mutex_);
  is_cancelled_ = true;
  changed_.notify_all();
}

void BackgroundSave::conclude(const std::vector<std::string>& states) {
  const bool is_there = states[0][0] == static_cast<char>(State::kFinished);
  std::string error =
      "[save] the first rank has not seen what the others have written: give a folder that all ranks see";
  for (size_t rank = 0; rank < states.size(); ++rank) {
    if (states[rank][0] == static_cast<char>(State::kFailed)) {
      error = "[save] rank " + std::to_string(rank) + ": " + states[rank].substr(1);
      break;
    }
  }
  if (!is_there && rank_ == 0) {
    cancel();
    wait_for_end();
    save_.give_up();
  }
  const std::lock_guard lock(mutex_);
  is_settled_ = true;
  (is_there ? path_ : error_) = is_there ? states[0].substr(1) : error;
}

void BackgroundSave::wait_for_end() {
  if (getpid() != process_) {
    return; // a forked child has no such thread
  }
  {
    std::unique_lock lock(mutex_);
    const auto is_at_it = [&] { return state_ == State::kWriting || state_ == State::kFinishing; };
    changed_.wait(lock, [&] { return has_ended_ || !is_at_it(); });
    const auto patience = std::max<Clock::duration>(kPatience, written_ - begun_);
    if (!changed_.wait_until(lock, written_ + patience, [&] { return has_ended_ || is_at_it() || is_cancelled_; })) {
      log::warn("[save_async] not all ranks have written their part of {}: it is given up", save_.folder());
      is_cancelled_ = true;
      changed_.notify_all();
    }
  }
  const std::lock_guard lock(joining_);
  if (thread_.joinable()) {
    thread_.join();
  }
}

void BackgroundSave::let_go() {
  if (getpid() != process_) {
    return;
  }
  wait_for_end();
  warn_of_error();
  group_.reset();
}

void BackgroundSave::warn_of_error() {
  if (getpid() != process_) {
    return; // the lock may have been held at the fork
  }
  const std::lock_guard lock(mutex_);
  if (std::exchange(is_told_, true)) {
    return;
  }
  if (!error_.empty()) {
    log::warn("{} (of {}, for which nobody has waited)", error_, save_.folder());
  } else if (state_ == State::kFailed || state_ == State::kGivenUp) {
    log::warn(
        "[save_async] {} could not be written, and nobody has waited for it: {}",
        save_.folder(),
        state_ == State::kFailed ? text_ : "other ranks have not written their part");
  }
}

void BackgroundSave::wait_for_all() {
  if (saving_process != getpid()) {
    return;
  }
  for (const auto& save : last_saves().all()) {
    save->wait_for_end();
    save->warn_of_error();
  }
}

void BackgroundSave::expect_settled(const std::string& run, const char* operation) {
  for (const auto& save : last_saves().all()) {
    const std::lock_guard lock(save->mutex_);
    const bool has_ended = save->has_ended_ || save->is_settled_;
    const bool may_write = !has_ended && save->rank_of_job_ == log::rank() && save->process_ == getpid();
    FSDP_CHECK(
        !may_write || !save->save_.is_into(run),
        "[{}] {} is being written into by save_async, for another group of ranks or model: wait() for that first",
        operation,
        run);
  }
}

} // namespace fsdp::disk
