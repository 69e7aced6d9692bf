#include "interrupt.h"

#include <csignal>
#include <ctime>

namespace train_gpt {
namespace {

volatile std::sig_atomic_t requested = 0;
volatile std::time_t requested_at = 0;

void on_signal(int number) {
  std::timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (requested != 0 && now.tv_sec - requested_at > 1) {
    std::signal(number, SIG_DFL);
    std::raise(number);
  }
  if (requested == 0) {
    requested_at = now.tv_sec;
    requested = 1;
  }
}

} // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGUSR1, &action, nullptr);
}

bool interrupted() {
  return requested != 0;
}

} // namespace train_gpt
