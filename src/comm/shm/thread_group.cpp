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
#include "comm/world.h"

namespace fsdp {
namespace {

// The exceptions of the ranks. Thread safe.
class Failures {
 public:
  // A CommError is mostly the echo of what happened to another rank.
  void add(std::exception_ptr failure, bool is_echo) {
    std::lock_guard lock(mutex_);
    std::exception_ptr& first = is_echo ? echo_ : cause_;
    first = first ? first : std::move(failure);
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
      require(word != kLeft, " was left alone by rank ", r);
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
    store_->set(key(++round_, rank_), word);
  }
  std::string heard(int rank) const {
    try {
      return store_->get_to_str(key(round_, rank));
    } catch (const c10::DistStoreError&) {
      require(false, " waited in vain for rank ", rank);
      throw;
    }
  }
  void require(bool condition, const char* what, int other) const {
    if (!condition) {
      throw CommError(c10::str("[join thread group] rank ", rank_, what, other));
    }
  }
  static std::string key(int round, int rank) {
    return c10::str(round, "/", rank);
  }

  const std::string kHere = "here ";
  const std::string kLeft = "left";
  StorePtr store_;
  int rank_;
  int size_;
  int round_ = 0;
};

// Calls `action`; if it throws, remembers that and tells `on_failure` why.
template <typename Action, typename OnFailure>
void guarded(Failures& failures, const Action& action, const OnFailure& on_failure) {
  try {
    action();
  } catch (const CommError& error) {
    failures.add(std::current_exception(), /*is_echo=*/true);
    on_failure(error.what());
  } catch (const std::exception& error) {
    failures.add(std::current_exception(), /*is_echo=*/false);
    on_failure(error.what());
  } catch (...) {
    failures.add(std::current_exception(), /*is_echo=*/false);
    on_failure("an exception that is no std::exception");
  }
}

void run_rank(int rank, const std::shared_ptr<Group>& group, const std::function<void()>& body, Failures& failures) {
  log::set_thread_rank(rank);
  const ThreadWorld world({group, rank, c10::kCPU});
  guarded(failures, body, [&](const std::string& reason) { group->abort(reason); });
}

void join_and_run(
    int rank,
    int size,
    const StorePtr& store,
    const ShmOptions& options,
    const std::function<void()>& body,
    Failures& failures) {
  Meeting meeting(store, rank, size);
  const auto exchange = [&](const std::string& mine) { return meeting.exchange(mine); };
  guarded(
      failures,
      [&] { run_rank(rank, shm_group(rank, size, exchange, options), body, failures); },
      [&](const std::string&) { meeting.leave(); });
}

} // namespace

void thread_group(int size, const std::function<void()>& body, std::chrono::milliseconds timeout) {
  FSDP_CHECK(size >= 1, "[thread group] expected at least one rank, got ", size);
  Failures failures;
  if (size == 1) {
    const ThreadWorld world({group_of_one(), 0, c10::kCPU});
    body();
    return;
  }
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365))); // no clock overflows
  const ShmOptions options{timeout, /*arena=*/false};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { join_and_run(rank, size, store, options, body, failures); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  failures.rethrow();
}

} // namespace fsdp
