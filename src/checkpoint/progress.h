#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

namespace fsdp::disk {

/// How far a long save or load has come: a bar on the first rank's terminal, from the third second on.
class Progress {
 public:
  using Clock = std::chrono::steady_clock;

  /// Of what nobody looks at.
  Progress() = default;
  /// On a terminal behind stderr, if `shown`; never with FSDP_PROGRESS=0.
  Progress(std::string what, int64_t bytes, bool shown);
  /// Through whatever writes it, at whatever time.
  Progress(
      std::string what,
      int64_t bytes,
      std::function<void(const std::string&)> write,
      std::function<Clock::time_point()> now);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// The bar makes room for what is written next.
  ~Progress();

  void add(int64_t bytes);

 private:
  void show();

  std::string what_{};
  int64_t bytes_ = 0;
  int64_t done_ = 0;
  std::function<void(const std::string&)> write_{}; // null: nobody looks
  std::function<Clock::time_point()> now_{};
  Clock::time_point begin_{}, next_{};
  bool is_shown_ = false;
};

} // namespace fsdp::disk
