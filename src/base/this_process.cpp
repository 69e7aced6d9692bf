#include "base/this_process.h"

#include <atomic>

#include <pthread.h>
#include <unistd.h>

namespace fsdp {
namespace {

std::atomic<pid_t>& known() {
  static std::atomic<pid_t> process{getpid()};
  return process;
}

[[maybe_unused]] const int asked_after_fork = pthread_atfork(nullptr, nullptr, [] { known() = getpid(); });

} // namespace

pid_t this_process() {
  return known().load(std::memory_order_relaxed);
}

} // namespace fsdp
