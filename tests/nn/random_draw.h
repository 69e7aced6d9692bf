#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace fsdp::testing::random {

/// Numbers that a seed alone decides, on every machine.
class Draw {
 public:
  explicit Draw(uint64_t seed) : numbers_(seed) {
    numbers_.discard(16);
  }
  int number() {
    return static_cast<int>(numbers_() >> 40);
  }
  int below(int end) {
    return number() % end;
  }
  bool chance(int percent) {
    return below(100) < percent;
  }
  template <typename T>
  const T& one_of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(below(static_cast<int>(choices.size())))];
  }

 private:
  std::mt19937_64 numbers_;
};

} // namespace fsdp::testing::random
