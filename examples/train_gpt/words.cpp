#include "words.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace train_gpt {

std::string grouped(int64_t number) {
  std::string digits = std::to_string(number);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > (number < 0 ? 1 : 0); at -= 3) {
    digits.insert(at, ",");
  }
  return digits;
}

std::string as_bytes(double bytes) {
  const char* unit = "KiB";
  bytes /= 1024;
  for (const char* next : {"MiB", "GiB", "TiB"}) {
    if (bytes < 1000) {
      break;
    }
    bytes /= 1024;
    unit = next;
  }
  return print("%.*f %s", bytes < 10 ? 2 : bytes < 100 ? 1 : 0, bytes, unit);
}

std::string as_time(double seconds) {
  auto whole = static_cast<long>(std::llround(seconds));
  if (whole < 3600) {
    return print("%ld:%02ld", whole / 60, whole % 60);
  }
  return print("%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60, whole % 60);
}

std::string print(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char line[512];
  vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  return line;
}

} // namespace train_gpt
