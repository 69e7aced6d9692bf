#include "comm/within_limit.h"

#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include <unistd.h>

namespace fsdp {
namespace {

constexpr std::chrono::milliseconds kPatienceAtExit{5000};

/// The background threads that run. Never destroyed: they may end after everything else.
struct Running {
  std::mutex mutex;
  std::condition_variable ended;
  int count = 0;
  pid_t process = getpid();
};

Running& running() {
  static auto* all = new Running();
  if (all->process != getpid()) { // a forked child has none of them, and maybe a lock that one of them held
    all = new Running();
  }
  return *all;
}

void let_them_end() {
  std::unique_lock lock(running().mutex);
  running().ended.wait_for(lock, kPatienceAtExit, [] { return running().count == 0; });
}

void count(int change) {
  const std::scoped_lock lock(running().mutex);
  running().count += change;
  running().ended.notify_all();
}

} // namespace

void in_background(std::function<void()> work) {
  static const int registered = std::atexit(let_them_end);
  static_cast<void>(registered);
  count(+1);
  try {
    std::thread([work = std::move(work)]() mutable {
      work();
      work = nullptr; // what it owns goes before it is counted as ended
      count(-1);
    }).detach();
  } catch (...) { // the system has no more threads
    count(-1);
    throw;
  }
}

} // namespace fsdp
