#pragma once

#include <cstdint>

namespace train_gpt {

/// A linear rise over `warmup` steps, then half a cosine down to a tenth of the peak.
struct Schedule {
  double peak;
  int64_t warmup;
  int64_t steps;

  double learning_rate(int64_t step) const;
};

} // namespace train_gpt
