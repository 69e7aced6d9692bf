#pragma once

#include <string>

namespace train_gpt {

struct Text {
  std::string source; ///< where it comes from
  std::string bytes;
};

/// The file's bytes; without a path, the help texts of the Python on this machine. fsdp::Error where there is no text.
Text load_text(const std::string& path);

/// What the string literals of a Python source say, without the code around them.
std::string python_literals(const std::string& source);

} // namespace train_gpt
