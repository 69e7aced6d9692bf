#include "words.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>

namespace train_gpt {

std::string grouped(int64_t number) {
  const std::string digits = std::to_string(number);
  const size_t sign = number < 0 ? 1 : 0;
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > sign && (digits.size() - i) % 3 == 0) {
      text += ',';
    }
    text += digits[i];
  }
  return text;
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
