#pragma once

#include <string_view>

namespace fsdp::disk {

/// Whether this names a file in the folder in which it is looked for, and nowhere else.
inline bool is_plain_name(std::string_view name) {
  return !name.empty() && name[0] != '.' && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

} // namespace fsdp::disk
