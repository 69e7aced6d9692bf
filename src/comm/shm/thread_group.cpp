#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fsdp/group.h>
#include "base/check.h"
#include "base/log.h"
#include "comm/shm/thread_exchange.h"
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
    shm::ThreadExchange& meeting,
    const ShmOptions& options,
    const std::function<void()>& body,
    Failures& failures) {
  const auto exchange = [&](const std::string& mine) { return meeting.exchange(rank, mine); };
  guarded(
      failures,
      [&] { run_rank(rank, shm_group(rank, size, exchange, options), body, failures); },
      [&](const std::string&) { meeting.leave(rank); });
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
  shm::ThreadExchange meeting(size, timeout);
  const ShmOptions options{timeout, /*arena=*/false};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] { join_and_run(rank, size, meeting, options, body, failures); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  failures.rethrow();
}

} // namespace fsdp
