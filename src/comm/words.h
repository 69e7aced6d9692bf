#pragma once

#include <chrono>
#include <exception>
#include <string>
#include <string_view>

#include <c10/util/Exception.h>

#include <fsdp/group.h>

#include "base/phrase.h"

/// Words for errors.
namespace fsdp {

/// An exception's message without the C++ stack that c10 appends.
inline std::string message_of(const std::exception& error) {
  const auto* from_c10 = dynamic_cast<const c10::Error*>(&error);
  return from_c10 ? from_c10->what_without_backtrace() : error.what();
}

/// "unshard of 'blocks.3'"
inline std::string describe(std::string_view operation, std::string_view unit) {
  return unit.empty() ? std::string(operation) : phrase("{} of '{}'", operation, unit);
}
inline std::string describe(const Label& label) {
  return describe(label.operation, label.unit);
}

/// "2.5 s"
inline std::string in_seconds(std::chrono::milliseconds time) {
  return phrase("{} s", static_cast<double>(time.count()) / 1000);
}

} // namespace fsdp
