#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "history.h"

namespace train_gpt {

/// Tells of the run while it runs: a bar that moves on a terminal, some twenty lines elsewhere.
class Progress {
 public:
  Progress(int64_t steps, bool quiet);
  void show(const StepRecord& record);
  /// Ends the bar's line, so that others can be written.
  void finish();

 private:
  std::string bar(const StepRecord& record) const;
  std::string line(const StepRecord& record) const;
  std::string time_left(const StepRecord& record) const;

  int64_t steps_;
  bool quiet_;
  bool terminal_;
  double speed_ = 0; // tokens per second, smoothed
  std::chrono::steady_clock::time_point shown_{};
};

} // namespace train_gpt
