#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>

#include "words.h"

namespace train_gpt {
namespace {

constexpr int64_t kLines = 20;

size_t terminal_width() {
  winsize size{};
  bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : 80;
}

} // namespace

Progress::Progress(int64_t steps, bool quiet) : steps_(steps), quiet_(quiet), terminal_(isatty(STDOUT_FILENO)) {}

void Progress::show(const StepRecord& record) {
  if (quiet_) {
    return;
  }
  speed_ = speed_ == 0 ? record.tokens_per_second : 0.9 * speed_ + 0.1 * record.tokens_per_second;
  auto now = std::chrono::steady_clock::now();
  bool last = record.step == steps_;
  if (terminal_ && (last || now - shown_ > std::chrono::milliseconds(100))) {
    std::cout << "\r\033[K" << bar(record) << std::flush;
    shown_ = now;
  } else if (!terminal_ && (last || record.step == 1 || record.step % std::max<int64_t>(steps_ / kLines, 1) == 0)) {
    std::cout << line(record) << std::endl;
  }
}

void Progress::finish() {
  if (terminal_ && !quiet_) {
    std::cout << std::endl;
  }
}

std::string Progress::time_left(const StepRecord& record) const {
  double per_step = record.seconds / static_cast<double>(record.step);
  return as_time(per_step * static_cast<double>(steps_ - record.step));
}

std::string Progress::line(const StepRecord& record) const {
  return print(
      "step %5ld/%ld  loss %.4f  lr %.2e  %7s tokens/s  %8s  %s left",
      record.step,
      steps_,
      record.loss,
      record.learning_rate,
      grouped(static_cast<int64_t>(speed_)).c_str(),
      as_bytes(record.memory).c_str(),
      time_left(record).c_str());
}

std::string Progress::bar(const StepRecord& record) const {
  std::string right = print(
      " %ld/%ld  loss %.4f  %s tok/s  %s  %s left",
      record.step,
      steps_,
      record.loss,
      grouped(static_cast<int64_t>(speed_)).c_str(),
      as_bytes(record.memory).c_str(),
      time_left(record).c_str());
  size_t width = terminal_width() - 1; // the last column would wrap
  if (right.size() + 10 > width) {
    return right.substr(1, width);
  }
  size_t room = std::min<size_t>(width - right.size() - 2, 40);
  std::string filled(room * record.step / steps_, '=');
  filled.resize(room, ' ');
  return print("[%s]%s", filled.c_str(), right.c_str());
}

} // namespace train_gpt
