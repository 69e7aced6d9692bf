#include "checkpoint/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/env.h"

namespace fsdp::disk {

namespace {

constexpr auto kShort = std::chrono::seconds(2); // nobody waits for a bar
constexpr auto kBetween = std::chrono::milliseconds(200);
constexpr int kCells = 30;

void write_to_stderr(const std::string& text) {
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

std::string gigabytes(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f", static_cast<double>(bytes) * 1e-9);
  return text;
}

} // namespace

Progress::Progress(std::string what, int64_t bytes, bool shown)
    : Progress(std::move(what), bytes, nullptr, &Clock::now) {
  if (shown && isatty(STDERR_FILENO) == 1 && env::flag("FSDP_PROGRESS").value_or(true)) {
    write_ = &write_to_stderr;
  }
}

Progress::Progress(
    std::string what,
    int64_t bytes,
    std::function<void(const std::string&)> write,
    std::function<Clock::time_point()> now)
    : what_(std::move(what)), bytes_(bytes), write_(std::move(write)), now_(std::move(now)), begin_(now_()) {
  next_ = begin_ + kShort;
}

Progress::~Progress() {
  if (is_shown_) {
    write_("\r\033[K");
  }
}

void Progress::add(int64_t bytes) {
  done_ += bytes;
  if (write_ && now_() >= next_) {
    show();
    next_ = now_() + kBetween;
  }
}

void Progress::show() {
  const double part = bytes_ == 0 ? 1 : std::min(1.0, static_cast<double>(done_) / static_cast<double>(bytes_));
  const auto full = static_cast<size_t>(part * kCells);
  const double seconds = std::chrono::duration<double>(now_() - begin_).count();
  char numbers[64];
  std::snprintf(
      numbers, sizeof(numbers), "%3d%%, %.0f s left", static_cast<int>(part * 100), seconds * (1 - part) / part);
  write_(
      "\r" + what_ + " [" + std::string(full, '#') + std::string(kCells - full, '.') + "] " + gigabytes(done_) +
      " of " + gigabytes(bytes_) + " GB, " + numbers + "\033[K");
  is_shown_ = true;
}

} // namespace fsdp::disk
