#pragma once

#include "nn/parity.h"

namespace fsdp::testing {

/// Empty if there is no error.
inline std::string message_of(const std::function<void()>& mistake) {
  try {
    mistake();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

/// Runs `mistake` on every rank; expects an error whose message has all the parts.
inline void expect_error(int ranks, const std::function<void()>& mistake, const std::vector<std::string>& parts) {
  on_threads(ranks, [&] {
    const std::string message = message_of(mistake);
    ASSERT_FALSE(message.empty()) << "no error";
    for (const auto& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
    }
  });
}

} // namespace fsdp::testing
