#pragma once

#include <string>

#include <ATen/core/ivalue.h>
#include <nlohmann/json.hpp>

namespace fsdp::disk {

/// Numbers with all their bits, truth values, texts, None, and lists, tuples and dictionaries of these (keys are texts
/// and whole numbers). An Error, which names it, for anything else.
nlohmann::json json_of(const c10::IValue& value, const std::string& name);
c10::IValue value_in(const nlohmann::json& json, const std::string& name);

} // namespace fsdp::disk
