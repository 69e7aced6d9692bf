#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fsdp/describe.h>
#include <nlohmann/json_fwd.hpp>

namespace train_gpt {

struct StepRecord {
  int64_t step; ///< from 1
  double loss; ///< the mean over all ranks, in nats per byte
  double learning_rate;
  double gradient_norm; ///< before clipping
  double tokens_per_second; ///< of all ranks together
  double memory; ///< bytes, of all ranks together
  double seconds; ///< since training began
};

/// What happened, for the report and the metrics.
struct History {
  std::vector<std::pair<std::string, std::string>> facts; ///< of the machine, the job and the text
  std::vector<std::pair<std::string, std::string>> options;
  std::vector<fsdp::UnitDescription> units; ///< none when the run is not sharded
  std::vector<StepRecord> steps;
  std::optional<double> held_back_before;
  std::optional<double> held_back_after;
  std::string sample;
  bool interrupted = false;
};

nlohmann::json to_json(const StepRecord& record);
nlohmann::json to_json(const History& history);

/// metrics.jsonl: one JSON object a line, written as things happen. The first and the last line tell of the whole run.
class MetricsFile {
 public:
  MetricsFile() = default; ///< writes nothing
  explicit MetricsFile(const std::string& path);
  void begin(const History& history); ///< with the steps of which a checkpoint told
  void step(const StepRecord& record);
  void end(const History& history);

 private:
  void line(const nlohmann::json& object);

  std::ofstream file_;
};

} // namespace train_gpt
