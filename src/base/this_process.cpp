#include "base/this_process.h"

#include <atomic>

#include <pthread.h>
#include <unistd.h>

namespace fsdp {
namespace {

std::atomic<pid_t> known{0}; // 0: not yet asked

[[maybe_unused]] const int asked_again_after_fork = pthread_atfork(nullptr, nullptr, [] { known = 0; });

} // namespace

pid_t this_process() {
  pid_t process = known.load(std::memory_order_relaxed);
  if (process == 0) {
    process = getpid();
    known.store(process, std::memory_order_relaxed);
  }
  return process;
}

} // namespace fsdp
