#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace train_gpt {

/// Command-line options: each is a name, what it means, and how to read and print its value.
class Flags {
 public:
  struct Flag {
    std::string name; ///< without the dashes
    std::string value; ///< what stands for the value in the help text; empty for an option without one
    std::string help;
    std::function<void(const std::string&)> read; ///< throws std::invalid_argument saying what was expected
    std::function<std::string()> print;
  };

  void heading(std::string title);
  void add(Flag flag);
  void number(std::string name, std::string help, int64_t& target, int64_t min);
  void number(std::string name, std::string help, double& target, double min);
  void text(std::string name, std::string value, std::string help, std::string& target);
  void toggle(std::string name, std::string help, bool& target);

  /// Reads `--name value`, `--name=value` and `--name`. An unknown name is an fsdp::Error that suggests the nearest
  /// one.
  void parse(const std::vector<std::string>& arguments) const;
  /// The options with their present values, under their headings.
  std::string help() const;
  /// Every option's present value, in the order of the help text.
  std::vector<std::pair<std::string, std::string>> values() const;

 private:
  const Flag& find(const std::string& name) const;
  std::string nearest(const std::string& name) const;

  std::vector<Flag> flags_; // a heading is a flag without a reader
};

} // namespace train_gpt
