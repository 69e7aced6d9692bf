#include "checkpoint/dtype_names.h"

#include <array>
#include <utility>

namespace fsdp::disk {

namespace {

using Type = c10::ScalarType;

constexpr std::array<std::pair<std::string_view, Type>, 17> kNames{{
    {"BOOL", Type::Bool},
    {"U8", Type::Byte},
    {"I8", Type::Char},
    {"F8_E4M3", Type::Float8_e4m3fn},
    {"F8_E5M2", Type::Float8_e5m2},
    {"F8_E8M0", Type::Float8_e8m0fnu},
    {"U16", Type::UInt16},
    {"I16", Type::Short},
    {"F16", Type::Half},
    {"BF16", Type::BFloat16},
    {"U32", Type::UInt32},
    {"I32", Type::Int},
    {"F32", Type::Float},
    {"U64", Type::UInt64},
    {"I64", Type::Long},
    {"F64", Type::Double},
    {"C64", Type::ComplexFloat},
}};

} // namespace

std::optional<Type> dtype_named(std::string_view name) {
  for (const auto& [known, dtype] : kNames) {
    if (known == name) {
      return dtype;
    }
  }
  return std::nullopt;
}

std::optional<std::string_view> name_of(Type dtype) {
  for (const auto& [name, known] : kNames) {
    if (known == dtype) {
      return name;
    }
  }
  return std::nullopt;
}

} // namespace fsdp::disk
