#pragma once

#include <cstdint>
#include <string>

namespace train_gpt {

/// 1234567 -> "1,234,567"
std::string grouped(int64_t number);
/// 3 significant digits and a binary unit: "812 MiB"
std::string as_bytes(double bytes);
/// "1:05", "2:03:10"
std::string as_time(double seconds);
/// printf into a string.
[[gnu::format(printf, 1, 2)]] std::string print(const char* format, ...);

} // namespace train_gpt
