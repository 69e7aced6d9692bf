#pragma once

#include <string>

#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp::testing {

/// The message of the fsdp::Error, or of that kind of it, that `action` throws; a failure of the test if it throws
/// none.
template <typename Expected = Error, typename Action>
std::string error_message(const Action& action) {
  try {
    action();
  } catch (const Expected& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected an fsdp::Error";
  return "";
}

inline ::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos ? ::testing::AssertionSuccess()
                                              : ::testing::AssertionFailure() << "no \"" << part << "\" in: " << text;
}

} // namespace fsdp::testing
