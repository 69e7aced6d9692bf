#include "flags.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include <fsdp/error.h>

namespace train_gpt {
namespace {

template <typename Number>
Number read_number(const std::string& text, Number min) {
  Number number{};
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || !(number >= min)) {
    std::ostringstream expected;
    expected << "a number from " << min << " up";
    throw std::invalid_argument(expected.str());
  }
  return number;
}

template <typename Number>
std::string print_number(Number number) {
  std::ostringstream out;
  out << number;
  return out.str();
}

/// How many letters must be added, dropped or changed to get from one word to the other.
size_t edit_distance(const std::string& from, const std::string& to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < from.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < to.size(); ++j) {
      size_t change = diagonal + (from[i] != to[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({change, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

} // namespace

void Flags::heading(std::string title) {
  flags_.push_back({.name = std::move(title), .value = "", .help = "", .read = nullptr, .print = nullptr});
}

void Flags::add(Flag flag) {
  flags_.push_back(std::move(flag));
}

void Flags::number(std::string name, std::string help, int64_t& target, int64_t min) {
  add(
      {std::move(name),
       "N",
       std::move(help),
       [&target, min](const std::string& text) { target = read_number(text, min); },
       [&target] { return print_number(target); }});
}

void Flags::number(std::string name, std::string help, double& target, double min) {
  add(
      {std::move(name),
       "X",
       std::move(help),
       [&target, min](const std::string& text) { target = read_number(text, min); },
       [&target] { return print_number(target); }});
}

void Flags::text(std::string name, std::string value, std::string help, std::string& target) {
  add(
      {std::move(name),
       std::move(value),
       std::move(help),
       [&target](const std::string& text) { target = text; },
       [&target] { return target; }});
}

void Flags::toggle(std::string name, std::string help, bool& target) {
  add(
      {std::move(name),
       "",
       std::move(help),
       [&target](const std::string&) { target = true; },
       [&target] { return target ? "yes" : ""; }});
}

std::string Flags::nearest(const std::string& name) const {
  std::string best;
  size_t best_distance = name.size() / 3 + 2;
  for (const Flag& flag : flags_) {
    bool longer = flag.read && name.size() > 2 && flag.name.starts_with(name);
    size_t distance = longer ? 1 : edit_distance(name, flag.name);
    if (flag.read && distance < best_distance) {
      best = flag.name;
      best_distance = distance;
    }
  }
  return best;
}

const Flags::Flag& Flags::find(const std::string& name) const {
  for (const Flag& flag : flags_) {
    if (flag.read && flag.name == name) {
      return flag;
    }
  }
  std::string guess = nearest(name);
  std::string advice = guess.empty() ? "--help lists them" : "did you mean --" + guess + "?";
  throw fsdp::Error("[options] expected a known option, got --" + name + ": " + advice);
}

void Flags::parse(const std::vector<std::string>& arguments) const {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (!argument.starts_with("--")) {
      throw fsdp::Error("[options] expected an option, got '" + argument + "': options begin with --, see --help");
    }
    size_t equals = argument.find('=');
    std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    const Flag& flag = find(name);
    bool takes_value = !flag.value.empty();
    bool has_value = equals != std::string::npos;
    if (takes_value && !has_value && i + 1 == arguments.size()) {
      throw fsdp::Error(
          "[options] expected a value after --" + name + ", got none: write --" + name + " " + flag.value);
    }
    if (!takes_value && has_value) {
      throw fsdp::Error("[options] expected no value for --" + name + ", got " + argument + ": write --" + name);
    }
    std::string value = has_value ? argument.substr(equals + 1) : takes_value ? arguments[++i] : "";
    try {
      flag.read(value);
    } catch (const std::invalid_argument& expected) {
      throw fsdp::Error(
          "[options] expected " + std::string(expected.what()) + " for --" + name + ", got '" + value + "'");
    }
  }
}

std::string Flags::help() const {
  std::ostringstream out;
  for (const Flag& flag : flags_) {
    if (!flag.read) {
      out << "\n" << flag.name << "\n";
      continue;
    }
    std::string left = "  --" + flag.name + (flag.value.empty() ? "" : " " + flag.value);
    left.resize(std::max<size_t>(left.size() + 1, 34), ' ');
    std::string value = flag.print();
    out << left << flag.help << (value.empty() ? "" : " [" + value + "]") << "\n";
  }
  return out.str();
}

std::vector<std::pair<std::string, std::string>> Flags::values() const {
  std::vector<std::pair<std::string, std::string>> values;
  for (const Flag& flag : flags_) {
    if (flag.read) {
      values.emplace_back(flag.name, flag.print());
    }
  }
  return values;
}

} // namespace train_gpt
