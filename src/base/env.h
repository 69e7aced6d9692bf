#pragma once

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

/// Typed reading of environment variables. Unset and empty both give nullopt; a value that does not parse is an Error
/// that names the variable, what it holds and what was expected. Nothing is cached. Thread safe as long as nobody calls
/// setenv.
namespace fsdp::env {

std::optional<std::string> string(const char* name);

/// A decimal number within [min, max].
std::optional<int64_t> integer(
    const char* name,
    int64_t min = std::numeric_limits<int64_t>::min(),
    int64_t max = std::numeric_limits<int64_t>::max());

/// 1, true, on, yes or 0, false, off, no, in any case.
std::optional<bool> flag(const char* name);

/// A positive number of seconds, fractions allowed.
std::optional<std::chrono::milliseconds> seconds(const char* name);

/// The position in `choices` of the variable's value.
std::optional<size_t> choice(const char* name, std::initializer_list<std::string_view> choices);

/// The variable's value, or an Error that says that `operation` needs it.
std::string required_string(const char* name, std::string_view operation);
int64_t required_integer(const char* name, std::string_view operation, int64_t min, int64_t max);

} // namespace fsdp::env
