#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace fsdp::disk {

/// Typed reading of a JSON object that anybody may have written. Errors name the file, and what was being read.
class JsonFields {
 public:
  JsonFields(const nlohmann::json& object, const std::string& path, std::string what);

  const nlohmann::json& object(const char* name) const;
  const nlohmann::json& list(const char* name) const;
  int64_t integer(const char* name) const; ///< 0 or more
  std::string text(const char* name) const;
  std::vector<int64_t> integers(const char* name) const; ///< likewise
  std::vector<std::string> texts(const char* name) const;

  [[noreturn]] void refuse(const std::string& why) const;
  void check(bool holds, const std::string& why) const {
    if (!holds) {
      refuse(why);
    }
  }

 private:
  const nlohmann::json& field(const char* name) const;
  int64_t integer_in(const nlohmann::json& value, const char* name) const;
  std::string text_in(const nlohmann::json& value, const char* name) const;

  const nlohmann::json& json_;
  const std::string& path_;
  std::string what_;
};

} // namespace fsdp::disk
