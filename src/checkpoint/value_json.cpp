#include "checkpoint/value_json.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>

#include "base/check.h"

namespace fsdp::disk {

namespace {

using c10::IValue;
using nlohmann::json;

constexpr int kDeepest = 32; // lists within lists

json number(double value) {
  if (std::isfinite(value)) {
    return value;
  }
  return {{"float", std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"}};
}

bool is_key(const IValue& value) {
  return value.isString() || value.isInt();
}

/// Of lists that have a type also when they are empty.
const std::vector<std::pair<std::string, c10::TypePtr>>& kinds() {
  static const std::vector<std::pair<std::string, c10::TypePtr>> all{
      {"int", c10::IntType::get()},
      {"float", c10::FloatType::get()},
      {"bool", c10::BoolType::get()},
      {"text", c10::StringType::get()}};
  return all;
}

json empty_list(const c10::Type& type) {
  const auto kind =
      std::find_if(kinds().begin(), kinds().end(), [&](const auto& each) { return *each.second == type; });
  return kind == kinds().end() ? json::array() : json{{"empty", kind->first}};
}

json encode(const IValue& value, const std::string& name, int depth);

template <typename Values>
json encode_each(const Values& values, const std::string& name, int depth) {
  json list = json::array();
  for (const auto& value : values) {
    list.push_back(encode(value, name, depth + 1));
  }
  return list;
}

// In their order, which objects do not keep; and keys may be numbers.
json encode_items(const c10::impl::GenericDict& dict, const std::string& name, int depth) {
  json list = json::array();
  for (const auto& item : dict) {
    FSDP_CHECK(is_key(item.key()), "[save] '{}' has a dictionary whose keys are not texts or whole numbers", name);
    list.push_back({encode(item.key(), name, depth + 1), encode(item.value(), name, depth + 1)});
  }
  return list;
}

json encode(const IValue& value, const std::string& name, int depth) {
  if (value.isNone()) {
    return nullptr;
  }
  if (value.isInt()) {
    return value.toInt();
  }
  if (value.isBool()) {
    return value.toBool();
  }
  if (value.isDouble()) {
    return number(value.toDouble());
  }
  if (value.isString()) {
    return value.toStringRef();
  }
  FSDP_CHECK(depth < kDeepest, "[save] '{}' has more than {} levels: give it flatter, or as a text", name, kDeepest);
  FSDP_CHECK(
      value.isTuple() || value.isList() || value.isGenericDict(),
      "[save] '{}' is, or has in it, {}: expected a number, a text, a tensor, or a list, tuple or dictionary of "
      "numbers and texts",
      name,
      value.tagKind());
  if (value.isGenericDict()) {
    return {{"dict", encode_items(value.toGenericDict(), name, depth)}};
  }
  if (value.isTuple()) {
    return {{"tuple", encode_each(value.toTupleRef().elements(), name, depth)}};
  }
  const auto values = value.toListRef();
  return values.empty() ? empty_list(*value.toList().elementType()) : encode_each(values, name, depth);
}

IValue special(const json& value, const std::string& name) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (value == "nan") {
    return std::numeric_limits<double>::quiet_NaN();
  }
  FSDP_CHECK(value == "inf" || value == "-inf", "[load] '{}' is no value that is saved: the index is damaged", name);
  return value == "inf" ? kInfinity : -kInfinity;
}

template <typename Item>
IValue list_of(const std::vector<IValue>& values) {
  c10::List<Item> list;
  for (const auto& value : values) {
    list.push_back(value.to<Item>());
  }
  return list;
}

template <typename Test>
bool are_all(const std::vector<IValue>& values, const Test& test) {
  return !values.empty() && std::all_of(values.begin(), values.end(), test);
}

// Of the type that a list of such values has in C++.
IValue list_of_any(const std::vector<IValue>& values) {
  if (are_all(values, [](const IValue& value) { return value.isBool(); })) {
    return list_of<bool>(values);
  }
  if (are_all(values, [](const IValue& value) { return value.isString(); })) {
    return list_of<std::string>(values);
  }
  if (are_all(values, [](const IValue& value) { return value.isInt(); })) {
    return list_of<int64_t>(values);
  }
  if (are_all(values, [](const IValue& value) { return value.isDouble(); })) {
    return list_of<double>(values);
  }
  c10::impl::GenericList list(c10::AnyType::get());
  for (const auto& value : values) {
    list.push_back(value);
  }
  return list;
}

IValue empty_list_of(const json& name_of_kind, const std::string& name) {
  const auto kind =
      std::find_if(kinds().begin(), kinds().end(), [&](const auto& each) { return name_of_kind == each.first; });
  FSDP_CHECK(kind != kinds().end(), "[load] '{}' is no value that is saved: the index is damaged", name);
  return c10::impl::GenericList(kind->second);
}

IValue decode(const json& json, const std::string& name, int depth);

std::vector<IValue> decode_each(const json& list, const std::string& name, int depth) {
  FSDP_CHECK(list.is_array() && depth < kDeepest, "[load] '{}' is no value that is saved: the index is damaged", name);
  std::vector<IValue> values;
  for (const auto& value : list) {
    values.push_back(decode(value, name, depth + 1));
  }
  return values;
}

c10::TypePtr type_of_all(const std::vector<IValue>& values) {
  if (are_all(values, [](const IValue& value) { return value.isString(); })) {
    return c10::StringType::get();
  }
  if (are_all(values, [](const IValue& value) { return value.isInt(); })) {
    return c10::IntType::get();
  }
  if (are_all(values, [](const IValue& value) { return value.isDouble(); })) {
    return c10::FloatType::get();
  }
  return c10::AnyType::get();
}

IValue decode_items(const json& list, const std::string& name, int depth) {
  FSDP_CHECK(list.is_array(), "[load] '{}' is no value that is saved: the index is damaged", name);
  std::vector<IValue> keys, values;
  for (const auto& item : list) {
    const auto pair = decode_each(item, name, depth);
    FSDP_CHECK(
        pair.size() == 2 && is_key(pair[0]), "[load] '{}' is no value that is saved: the index is damaged", name);
    keys.push_back(pair[0]);
    values.push_back(pair[1]);
  }
  c10::impl::GenericDict dict(type_of_all(keys), type_of_all(values));
  for (size_t i = 0; i < keys.size(); ++i) {
    dict.insert_or_assign(keys[i], values[i]);
  }
  return dict;
}

IValue decode_tagged(const json& object, const std::string& name, int depth) {
  FSDP_CHECK(object.size() == 1, "[load] '{}' is no value that is saved: the index is damaged", name);
  if (object.begin().key() == "float") {
    return special(object.begin().value(), name);
  }
  if (object.begin().key() == "empty") {
    return empty_list_of(object.begin().value(), name);
  }
  if (object.begin().key() == "dict") {
    return decode_items(object.begin().value(), name, depth);
  }
  FSDP_CHECK(object.begin().key() == "tuple", "[load] '{}' is no value that is saved: the index is damaged", name);
  return c10::ivalue::Tuple::create(decode_each(object.begin().value(), name, depth));
}

IValue decode(const json& json, const std::string& name, int depth) {
  if (json.is_null()) {
    return {};
  }
  if (json.is_boolean()) {
    return json.get<bool>();
  }
  if (json.is_number_integer()) {
    return json.get<int64_t>();
  }
  if (json.is_number_float()) {
    return json.get<double>();
  }
  if (json.is_string()) {
    return json.get<std::string>();
  }
  return json.is_object() ? decode_tagged(json, name, depth) : list_of_any(decode_each(json, name, depth));
}

} // namespace

json json_of(const IValue& value, const std::string& name) {
  return encode(value, name, 0);
}

IValue value_in(const json& json, const std::string& name) {
  return decode(json, name, 0);
}

} // namespace fsdp::disk
