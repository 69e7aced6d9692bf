#pragma once

#include <cstddef>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>

namespace fsdp {

/// A text with one {} for each argument, which is checked when it is compiled.
template <typename... Args>
struct TextWith {
  consteval TextWith(const char* literal) : text(literal) { // NOLINT(google-explicit-constructor)
    size_t places = 0;
    for (size_t at = text.find("{}"); at != std::string_view::npos; at = text.find("{}", at + 2)) {
      ++places;
    }
    if (places != sizeof...(Args)) {
      throw "a text needs one {} for each argument";
    }
  }
  std::string_view text;
};

/// The text with the arguments, as they are printed, in place of each {}.
template <typename... Args>
std::string phrase(TextWith<std::type_identity_t<Args>...> with, const Args&... args) {
  std::ostringstream out;
  std::string_view rest = with.text;
  [[maybe_unused]] const auto put = [&](const auto& arg) {
    const size_t place = rest.find("{}");
    out << rest.substr(0, place) << arg;
    rest.remove_prefix(place + 2);
  };
  (put(args), ...);
  out << rest;
  return out.str();
}

} // namespace fsdp
