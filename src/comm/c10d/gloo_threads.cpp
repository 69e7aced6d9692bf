#include "comm/c10d/gloo_threads.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include <sched.h>

namespace fsdp {

namespace {

constexpr auto kName = "gloo_tcp_loop";

std::string name_of(const std::filesystem::path& thread) {
  std::string name;
  std::getline(std::ifstream(thread / "comm"), name);
  return name;
}

} // namespace

void let_gloo_threads_stand_back() {
  std::error_code error; // without /proc nothing changes
  for (std::filesystem::directory_iterator thread("/proc/self/task", error), end; !error && thread != end;
       thread.increment(error)) {
    const pid_t id = std::atoi(thread->path().filename().c_str());
    if (name_of(thread->path()) == kName && sched_getscheduler(id) == SCHED_OTHER) {
      const sched_param usual{};
      static_cast<void>(sched_setscheduler(id, SCHED_BATCH, &usual));
    }
  }
}

} // namespace fsdp
