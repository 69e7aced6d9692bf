#include "checkpoint/background_save.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>

#include <fsdp/error.h>

#include "base/log.h"

namespace fsdp::disk {

namespace {

using namespace std::chrono_literals;

const Label kLabel{"save_async", ""};
constexpr auto kBetweenLooks = 20ms; // at the files of other ranks
constexpr auto kBetweenWords = 1s; // while ranks wait: none waits longer for another's word, however long writing takes
constexpr int kMostWords = 30; // with which ranks that have written wait for what they wrote to be seen
constexpr auto kPatience = 10s; // of a first rank that nobody waits for

/// The last of each group. One that had none has no entry, on all its ranks.
class LastSaves {
 public:
  struct Last {
    std::weak_ptr<Group> group{};
    std::weak_ptr<BackgroundSave> save{};
    std::shared_ptr<BackgroundSave::Ending> ending{};
  };

  void set(Last last) {
    const std::lock_guard lock(mutex_);
    const auto group = last.group.lock();
    std::erase_if(all_, [&](const Last& each) { return each.group.expired() || each.group.lock() == group; });
    all_.push_back(std::move(last));
  }
  std::optional<Last> of(const std::shared_ptr<Group>& group) {
    const std::lock_guard lock(mutex_);
    const auto last =
        std::find_if(all_.begin(), all_.end(), [&](const Last& each) { return each.group.lock() == group; });
    return last == all_.end() ? std::nullopt : std::optional(*last);
  }

 private:
  std::mutex mutex_{};
  std::vector<Last> all_{};
};

LastSaves& last_saves() {
  static auto* saves = new LastSaves;
  return *saves;
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
      process_(getpid()),
      begun_(std::chrono::steady_clock::now()) {}

BackgroundSave::~BackgroundSave() {
  if (getpid() != process_) { // a forked child has no such thread
    if (thread_.joinable()) {
      thread_.detach();
    }
    return;
  }
  wait_for_end();
  ending_->word = word();
  if (!is_told_ && state_ == State::kFailed) {
    log::warn("[save_async] {} could not be written, and nobody has waited for it: {}", save_.folder(), text_);
  }
}

void BackgroundSave::start(const std::shared_ptr<BackgroundSave>& save, const StateOfRank& state) {
  last_saves().set({save->group_, save, save->ending_});
  save->start(state);
}

void BackgroundSave::start(const StateOfRank& state) {
  try {
    save_.begin(state);
    save_.stage();
    const NoSignals no_signals;
    thread_ = std::thread([this, rank = log::rank()] {
      log::set_thread_rank(rank);
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
  }
  end();
}

void BackgroundSave::finish_when_all_have_written() {
  for (int rank = 1; rank < group_->size(); ++rank) {
    if (!wait_for_part(rank)) {
      become(State::kGivenUp, "");
      return;
    }
  }
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
  state_ = state;
  text_ = text;
  changed_.notify_all();
}

void BackgroundSave::fail(const std::string& text) {
  become(State::kFailed, text.empty() ? "an error without a text" : text);
  save_.note_failure();
}

void BackgroundSave::end() {
  const std::lock_guard lock(mutex_);
  has_ended_ = true;
  changed_.notify_all();
}

bool BackgroundSave::has_ended() const {
  const std::lock_guard lock(mutex_);
  return has_ended_;
}

std::string BackgroundSave::result() {
  if (!ending_->is_settled) {
    settle(*group_, *ending_, this);
  }
  is_told_ = true;
  if (!error_.empty()) {
    throw Error(error_);
  }
  return path_;
}

void BackgroundSave::settle(const std::shared_ptr<Group>& group) {
  const auto last = last_saves().of(group);
  if (last && !last->ending->is_settled) {
    settle(*group, *last->ending, last->save.lock().get());
  }
}

void BackgroundSave::settle(Group& group, Ending& ending, BackgroundSave* save) {
  for (int words = 0;;) {
    const auto states = group.exchange(save != nullptr ? save->wait_a_while() : ending.word, kLabel);
    const auto any_is = [&](State state) {
      return std::any_of(
          states.begin(), states.end(), [&](const auto& each) { return each[0] == static_cast<char>(state); });
    };
    const bool all_have_written = !any_is(State::kWriting);
    const bool is_open = states[0][0] == static_cast<char>(State::kWritten) && !any_is(State::kFailed);
    if (all_have_written && !is_open) {
      ending.is_settled = true;
      if (save != nullptr) {
        save->conclude(states);
      }
      return;
    }
    if (all_have_written && ++words == kMostWords && save != nullptr) {
      save->cancel();
    }
  }
}

std::string BackgroundSave::wait_a_while() const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kBetweenWords, [&] { return has_ended_; });
  return word();
}

std::string BackgroundSave::word() const {
  return static_cast<char>(state_) + text_;
}

void BackgroundSave::cancel() {
  const std::lock_guard lock(mutex_);
  is_cancelled_ = true;
  changed_.notify_all();
}

void BackgroundSave::conclude(const std::vector<std::string>& states) {
  if (states[0][0] == static_cast<char>(State::kFinished)) {
    path_ = states[0].substr(1);
    return;
  }
  error_ = "[save] not all ranks have written their part: what went wrong there is in their log";
  for (size_t rank = 0; rank < states.size(); ++rank) {
    if (states[rank][0] == static_cast<char>(State::kFailed)) {
      error_ = "[save] rank " + std::to_string(rank) + ": " + states[rank].substr(1);
      break;
    }
  }
  if (rank_ == 0) {
    cancel();
    wait_for_end();
    save_.give_up();
  }
}

void BackgroundSave::wait_for_end() {
  if (!thread_.joinable()) {
    return;
  }
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return has_ended_ || state_ != State::kWriting; });
    const auto patience = std::max<std::chrono::nanoseconds>(kPatience, std::chrono::steady_clock::now() - begun_);
    changed_.wait_for(lock, patience, [&] { return has_ended_; });
    if (!has_ended_) {
      log::warn("[save_async] not all ranks have written their part of {}: it is given up", save_.folder());
      is_cancelled_ = true;
      changed_.notify_all();
    }
  }
  thread_.join();
}

} // namespace fsdp::disk
