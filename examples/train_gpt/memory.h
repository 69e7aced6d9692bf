#pragma once

#include <chrono>
#include <cstdint>

namespace train_gpt {

/// This process's memory, with pages shared among n processes counted as 1/n (the kernel's "proportional set size"):
/// the sum over all processes is what they take together.
class MemoryGauge {
 public:
  /// Bytes. Asks the kernel at most once a second, since it has to walk the page tables.
  int64_t read();

 private:
  std::chrono::steady_clock::time_point asked_{};
  int64_t bytes_ = 0;
};

} // namespace train_gpt
