#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

namespace fsdp {

/// "512 B", "12.3 MiB", "4.0 GiB".
std::string human_bytes(int64_t bytes);

/// The items printed with `separator` between them.
template <typename Items>
std::string join(const Items& items, std::string_view separator = ", ") {
  std::ostringstream out;
  std::string_view before;
  for (const auto& item : items) {
    out << before << item;
    before = separator;
  }
  return out.str();
}

} // namespace fsdp
