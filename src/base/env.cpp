#include "base/env.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "base/check.h"
#include "base/format.h"

namespace fsdp::env {
namespace {

[[noreturn]] void fail_malformed(const char* name, const std::string& value, const std::string& expected) {
  fail("[environment] {} should be {}, but is \"{}\". Correct it or unset it.", name, expected, value);
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// The number that all of `text` spells, or nullopt.
template <typename Number>
std::optional<Number> parse(std::string_view text) {
  Number number{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  bool whole = error == std::errc() && end == text.data() + text.size();
  return whole ? std::optional(number) : std::nullopt;
}

std::string range_text(int64_t min, int64_t max) {
  bool below = min == std::numeric_limits<int64_t>::min();
  bool above = max == std::numeric_limits<int64_t>::max();
  if (below && above) {
    return "a whole number";
  }
  if (above) {
    return phrase("a whole number of at least {}", min);
  }
  return below ? phrase("a whole number of at most {}", max) : phrase("a whole number from {} to {}", min, max);
}

} // namespace

std::optional<std::string> string(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? std::optional<std::string>(value) : std::nullopt;
}

std::optional<int64_t> integer(const char* name, int64_t min, int64_t max) {
  auto text = string(name);
  if (!text) {
    return std::nullopt;
  }
  auto number = parse<int64_t>(*text);
  if (!number || *number < min || *number > max) {
    fail_malformed(name, *text, range_text(min, max));
  }
  return number;
}

std::optional<bool> flag(const char* name) {
  auto text = string(name);
  if (!text) {
    return std::nullopt;
  }
  std::string word = lower(*text);
  if (word == "1" || word == "true" || word == "on" || word == "yes") {
    return true;
  }
  if (word == "0" || word == "false" || word == "off" || word == "no") {
    return false;
  }
  fail_malformed(name, *text, "1 or 0 (or true, on, yes; false, off, no)");
}

std::optional<std::chrono::milliseconds> seconds(const char* name) {
  auto text = string(name);
  if (!text) {
    return std::nullopt;
  }
  constexpr double kLongest = 1e9;
  auto number = parse<double>(*text);
  if (!number || !(*number > 0) || *number > kLongest) {
    fail_malformed(name, *text, "a positive number of seconds");
  }
  return std::chrono::milliseconds(static_cast<int64_t>(std::ceil(*number * 1000)));
}

std::optional<size_t> choice(const char* name, std::initializer_list<std::string_view> choices) {
  auto text = string(name);
  if (!text) {
    return std::nullopt;
  }
  auto found = std::find(choices.begin(), choices.end(), lower(*text));
  if (found == choices.end()) {
    fail_malformed(name, *text, "one of " + join(choices));
  }
  return found - choices.begin();
}

std::string required_string(const char* name, std::string_view operation) {
  auto value = string(name);
  FSDP_CHECK(value, "[{}] the environment variable {} is needed, but is not set. Set it.", operation, name);
  return *value;
}

int64_t required_integer(const char* name, std::string_view operation, int64_t min, int64_t max) {
  required_string(name, operation);
  return *integer(name, min, max);
}

} // namespace fsdp::env
