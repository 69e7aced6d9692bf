#include "history.h"

#include <fsdp/error.h>
#include <nlohmann/json.hpp>

namespace train_gpt {
namespace {

using nlohmann::json;

json to_json(const std::vector<std::pair<std::string, std::string>>& pairs) {
  json object = json::array();
  for (const auto& [name, value] : pairs) {
    object.push_back({name, value});
  }
  return object;
}

json to_json(const fsdp::UnitDescription& unit) {
  return {
      {"name", unit.name},
      {"parameters", unit.parameters},
      {"numel", unit.numel},
      {"bytes_whole", unit.bytes_whole},
      {"bytes_shard", unit.bytes_shard},
      {"dtype", unit.dtype},
      {"mesh", unit.mesh},
      {"policy", unit.policy},
  };
}

template <typename Items>
json list(const Items& items) {
  json array = json::array();
  for (const auto& item : items) {
    array.push_back(to_json(item));
  }
  return array;
}

json or_null(const std::optional<double>& value) {
  return value ? json(*value) : json(nullptr);
}

} // namespace

json to_json(const StepRecord& record) {
  return {
      {"step", record.step},
      {"loss", record.loss},
      {"learning_rate", record.learning_rate},
      {"gradient_norm", record.gradient_norm},
      {"tokens_per_second", record.tokens_per_second},
      {"memory_bytes", record.memory},
      {"seconds", record.seconds},
  };
}

json to_json(const History& history) {
  return {
      {"facts", to_json(history.facts)},
      {"options", to_json(history.options)},
      {"units", list(history.units)},
      {"steps", list(history.steps)},
      {"held_back_before", or_null(history.held_back_before)},
      {"held_back_after", or_null(history.held_back_after)},
      {"sample", history.sample},
      {"interrupted", history.interrupted},
  };
}

MetricsFile::MetricsFile(const std::string& path) : file_(path) {
  if (!file_) {
    throw fsdp::Error("[results] expected to write " + path + ", could not: name another folder with --out DIR");
  }
}

void MetricsFile::begin(const History& history) {
  line(
      {{"event", "begin"},
       {"facts", to_json(history.facts)},
       {"options", to_json(history.options)},
       {"units", list(history.units)},
       {"held_back_loss", or_null(history.held_back_before)}});
  for (const auto& record : history.steps) {
    step(record);
  }
}

void MetricsFile::step(const StepRecord& record) {
  json object = to_json(record);
  object["event"] = "step";
  line(object);
}

void MetricsFile::end(const History& history) {
  line(
      {{"event", "end"},
       {"interrupted", history.interrupted},
       {"held_back_loss", or_null(history.held_back_after)},
       {"sample", history.sample}});
}

void MetricsFile::line(const json& object) {
  if (file_.is_open()) {
    // The model may write bytes that are no UTF-8.
    file_ << object.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace) << std::endl;
  }
}

} // namespace train_gpt
