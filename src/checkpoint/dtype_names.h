#pragma once

#include <optional>
#include <string_view>

#include <c10/core/ScalarType.h>

namespace fsdp::disk {

/// As safetensors names it ("BF16"); nothing for what the format or LibTorch does not have.
std::optional<c10::ScalarType> dtype_named(std::string_view name);
std::optional<std::string_view> name_of(c10::ScalarType dtype);

} // namespace fsdp::disk
