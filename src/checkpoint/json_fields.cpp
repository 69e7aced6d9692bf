#include "checkpoint/json_fields.h"

#include <limits>
#include <utility>

#include "base/check.h"
#include "checkpoint/safetensors_header.h"

namespace fsdp::disk {

JsonFields::JsonFields(const nlohmann::json& object, const std::string& path, std::string what)
    : json_(object), path_(path), what_(std::move(what)) {
  check(json_.is_object(), "is no object");
}

void JsonFields::refuse(const std::string& why) const {
  fail("[load] {}: {} {}; the index is damaged, or not libfsdp's", path_, shown(what_), why);
}

const nlohmann::json& JsonFields::field(const char* name) const {
  const auto found = json_.find(name);
  check(found != json_.end(), std::string("has no '") + name + "'");
  return *found;
}

const nlohmann::json& JsonFields::object(const char* name) const {
  const auto& value = field(name);
  check(value.is_object(), std::string("has something else than an object as '") + name + "'");
  return value;
}

const nlohmann::json& JsonFields::list(const char* name) const {
  const auto& value = field(name);
  check(value.is_array(), std::string("has something else than a list as '") + name + "'");
  return value;
}

int64_t JsonFields::integer_in(const nlohmann::json& value, const char* name) const {
  constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  check(
      value.is_number_unsigned() && value.get<uint64_t>() <= kMost,
      std::string("has something else than a number from 0 to 2^63 in '") + name + "'");
  return value.get<int64_t>();
}

std::string JsonFields::text_in(const nlohmann::json& value, const char* name) const {
  check(value.is_string(), std::string("has something else than a text in '") + name + "'");
  return value.get<std::string>();
}

int64_t JsonFields::integer(const char* name) const {
  return integer_in(field(name), name);
}

std::string JsonFields::text(const char* name) const {
  return text_in(field(name), name);
}

std::vector<int64_t> JsonFields::integers(const char* name) const {
  std::vector<int64_t> values;
  for (const auto& value : list(name)) {
    values.push_back(integer_in(value, name));
  }
  return values;
}

std::vector<std::string> JsonFields::texts(const char* name) const {
  std::vector<std::string> values;
  for (const auto& value : list(name)) {
    values.push_back(text_in(value, name));
  }
  return values;
}

} // namespace fsdp::disk
