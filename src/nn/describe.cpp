#include <fsdp/describe.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <fsdp/fully_shard.h>

#include "base/format.h"
#include "engine/prediction.h"
#include "engine/unit.h"
#include "nn/slots.h"
#include "nn/strangers.h"

namespace fsdp {

namespace {

using engine::Unit;

// "Float" as users write it: "float32".
std::string dtype_name(c10::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

std::string dtypes_of(const Unit& unit) {
  std::vector<std::string> names;
  for (const auto& param : unit.params()) {
    const auto stored = param->shard_dtype(), gathered = param->gathered_dtype();
    auto name = dtype_name(stored) + (stored == gathered ? "" : " -> " + dtype_name(gathered));
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      names.push_back(std::move(name));
    }
  }
  return join(names);
}

std::string policy_of(const Unit& unit) {
  std::string text = unit.reshards_after(engine::Phase::kForward) ? "reshard" : "keep";
  if (unit.policy.reshard_to) {
    text += " to " + std::to_string(*unit.policy.reshard_to);
  }
  return text + (unit.offloaded() ? ", offload" : "");
}

UnitDescription describe_unit(const Unit& unit) {
  UnitDescription text;
  text.name = unit.display_name();
  text.parameters = static_cast<int64_t>(unit.params().size());
  for (const auto& param : unit.params()) {
    text.numel += param->layout().numel();
    text.bytes_shard += static_cast<int64_t>(param->shard().nbytes());
  }
  text.bytes_whole = unit.predicted_whole_bytes();
  text.dtype = dtypes_of(unit);
  text.mesh = unit.mesh().str();
  text.policy = policy_of(unit);
  return text;
}

// Shards, their gradients, and what comes and goes in a step.
int64_t predict_peak(const std::vector<Unit*>& units, int64_t bytes_shard) {
  int64_t shard_gradients = 0;
  for (const Unit* unit : units) {
    for (const auto& param : unit->params()) {
      shard_gradients += param->trainable() ? static_cast<int64_t>(param->shard().nbytes()) : 0;
    }
  }
  return bytes_shard + shard_gradients + engine::prediction::passing_bytes(units);
}

std::vector<Unit*> units_of(const torch::nn::Module& module) {
  std::vector<Unit*> units;
  for (const auto& unit : nn::units_of(nn::slots_of(const_cast<torch::nn::Module&>(module)))) {
    units.push_back(unit.get());
  }
  return units;
}

Description describe_units(const std::vector<Unit*>& units) {
  Description description;
  for (const Unit* unit : units) {
    description.units.push_back(describe_unit(*unit));
    description.bytes_shard += description.units.back().bytes_shard;
  }
  description.bytes_peak = predict_peak(units, description.bytes_shard);
  return description;
}

} // namespace

Description describe(ConstModuleRef given) {
  const torch::nn::Module& module = given.for_operation("describe");
  nn::strangers::check_none(module, "describe");
  return describe_units(units_of(module));
}

Description describe(const FSDPModule& module) {
  return describe_units(module.unit()->with_those_below());
}

std::string Description::str() const {
  std::vector<std::vector<std::string>> rows{
      {"unit", "tensors", "parameters", "whole", "per rank", "dtype", "mesh", "policy"}};
  for (const auto& unit : units) {
    rows.push_back(
        {unit.name,
         std::to_string(unit.parameters),
         std::to_string(unit.numel),
         human_bytes(unit.bytes_whole),
         human_bytes(unit.bytes_shard),
         unit.dtype,
         unit.mesh,
         unit.policy});
  }
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  std::ostringstream out;
  for (const auto& row : rows) {
    for (size_t column = 0; column < row.size(); ++column) {
      const bool number = column >= 1 && column <= 4;
      out << (column == 0 ? "" : "  ") << (number ? std::right : std::left)
          << std::setw(static_cast<int>(widths[column])) << row[column];
    }
    out << "\n";
  }
  out << "This rank keeps " << human_bytes(bytes_shard) << " of shards; parameters and gradients take at most "
      << human_bytes(bytes_peak) << " in a step.\n";
  return out.str();
}

} // namespace fsdp
