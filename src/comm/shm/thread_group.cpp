#include <algorithm>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

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

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// One thread's part of all-gathers among them.
class Meeting {
 public:
  Meeting(StorePtr store, int rank, int size) : store_(std::move(store)), rank_(rank), size_(size) {}

  std::vector<std::string> exchange(const std::string& mine) {
    say(kHere + mine);
    std::vector<std::string> all;
    for (int r = 0; r < size_; ++r) {
      const std::string word = heard(r);
      if (word == kLeft) {
        throw CommError(phrase("[join thread group] rank {} was left alone by rank {}", rank_, r));
      }
      all.push_back(word.substr(kHere.size()));
    }
    return all;
  }
  // Lets the others fail: they are here, or have not come so far.
  void leave() {
    say(kLeft);
  }

 private:
  void say(const std::string& word) {
    ++round_;
    store_->set(key(rank_), word);
  }
  std::string heard(int rank) const {
    try {
      return store_->get_to_str(key(rank));
    } catch (const c10::DistStoreError&) {
      throw CommError(phrase("[join thread group] rank {} waited in vain for rank {}", rank_, rank));
    }
  }
  std::string key(int rank) const {
    return phrase("{}/{}", round_, rank);
  }

  const std::string kHere = "here ";
  const std::string kLeft = "left";
  StorePtr store_;
  int rank_;
  int size_;
  int round_ = 0;
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
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(bounded(timeout));
  const ShmOptions options{timeout, /*arena=*/false};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Meeting meeting(store, rank, size);
      const auto exchange = [&](const std::string& mine) { return meeting.exchange(mine); };
      try {
        run_rank(rank, shm_group(rank, size, exchange, options), body, failures);
      } catch (...) {
        failures.add();
        meeting.leave();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  failures.rethrow();
}

} // namespace fsdp
