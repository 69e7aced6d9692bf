#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fsdp/group.h>
#include "base/check.h"
#include "base/log.h"
#include "comm/within_limit.h"
#include "comm/words.h"
#include "comm/world.h"

namespace fsdp {
namespace {

// The exceptions of the ranks. Thread safe.
class Failures {
 public:
  // The exception that is being handled; returns its text. A CommError is mostly the echo of what happened to another
  // rank.
  std::string add() {
    const std::exception_ptr failure = std::current_exception();
    std::string text = "an exception that is no std::exception";
    bool is_echo = false;
    try {
      throw;
    } catch (const std::exception& error) {
      text = message_of(error);
      is_echo = dynamic_cast<const CommError*>(&error) != nullptr;
    } catch (...) {
    }
    const std::lock_guard lock(mutex_);
    std::exception_ptr& first = is_echo ? echo_ : cause_;
    first = first ? first : failure;
    return text;
  }
  void rethrow() const {
    if (cause_ || echo_) {
      std::rethrow_exception(cause_ ? cause_ : echo_);
    }
  }

 private:
  std::mutex mutex_;
  std::exception_ptr cause_;
  std::exception_ptr echo_;
};

// All-gathers among the threads. Thread safe.
class Meeting {
 public:
  Meeting(int size, std::chrono::milliseconds timeout) : timeout_(bounded(timeout)), words_(size) {}

  std::vector<std::string> exchange(int rank, const std::string& mine) {
    std::unique_lock lock(mutex_);
    const int round = round_;
    words_[rank] = mine;
    if (++here_ == words_.size() && !left_) {
      end_round();
    }
    if (!changed_.wait_for(lock, timeout_, [&] { return round_ != round || left_; })) {
      throw CommError(phrase("[join thread group] rank {} waited in vain for rank {}", rank, first_missing()));
    }
    if (round_ == round) {
      throw CommError(phrase("[join thread group] rank {} was left alone by rank {}", rank, *left_));
    }
    return all_;
  }
  // Lets the others fail, which wait or have not come so far.
  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    left_ = left_.value_or(rank);
    changed_.notify_all();
  }

 private:
  // Nobody ends the next one before all have read what was said in this one.
  void end_round() {
    all_.clear();
    for (auto& word : words_) {
      all_.push_back(*std::exchange(word, std::nullopt));
    }
    here_ = 0;
    ++round_;
    changed_.notify_all();
  }
  int first_missing() const {
    return static_cast<int>(std::find(words_.begin(), words_.end(), std::nullopt) - words_.begin());
  }

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_; // of all below
  std::condition_variable changed_;
  std::vector<std::optional<std::string>> words_; // by rank, of this round
  size_t here_ = 0; // so many of them
  std::vector<std::string> all_; // of the last round
  int round_ = 0;
  std::optional<int> left_; // the first rank that did
};

void run_rank(int rank, const std::shared_ptr<Group>& group, const std::function<void()>& body, Failures& failures) {
  log::set_thread_rank(rank);
  const ThreadWorld world({group, rank, c10::kCPU});
  try {
    body();
  } catch (...) {
    group->abort(failures.add());
  }
}

} // namespace

void thread_group(int size, const std::function<void()>& body, std::chrono::milliseconds timeout) {
  FSDP_CHECK(size >= 1, "[thread group] expected at least one rank, got {}", size);
  Failures failures;
  if (size == 1) {
    const ThreadWorld world({group_of_one(), 0, c10::kCPU});
    body();
    return;
  }
  Meeting meeting(size, timeout);
  const ShmOptions options{timeout, /*arena=*/false};
  const auto give_up = [&](int rank) {
    failures.add();
    meeting.leave(rank);
  };
  const auto run = [&](int rank) {
    const auto exchange = [&](const std::string& mine) { return meeting.exchange(rank, mine); };
    try {
      run_rank(rank, shm_group(rank, size, exchange, options), body, failures);
    } catch (...) {
      give_up(rank);
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    try {
      threads.emplace_back(run, rank);
    } catch (...) { // the system has no more threads
      give_up(rank);
      break;
    }
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  failures.rethrow();
}

} // namespace fsdp
