#include "schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace train_gpt {

double Schedule::learning_rate(int64_t step) const {
  if (step < warmup) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  }
  double length = static_cast<double>(std::max<int64_t>(steps - warmup, 1));
  double progress = static_cast<double>(step - warmup) / length;
  double cosine = (1 + std::cos(std::numbers::pi * progress)) / 2;
  return peak * (0.1 + 0.9 * cosine);
}

} // namespace train_gpt
