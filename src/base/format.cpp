#include "base/format.h"

#include <array>
#include <cmath>
#include <iomanip>

namespace fsdp {

std::string human_bytes(int64_t bytes) {
  constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (std::llabs(bytes) < 1024) {
    return std::to_string(bytes) + " B";
  }
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  // 1023.95 would be printed as 1024.0.
  while (std::fabs(value) >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << value << ' ' << kUnits[unit];
  return out.str();
}

} // namespace fsdp
