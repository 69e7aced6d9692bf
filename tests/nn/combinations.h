#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/selected.h"

/// Every combination of the options.
namespace fsdp::testing::combinations {

enum class Reshard { kTrue, kFalse, kFewer };

struct Combination {
  Reshard reshard;
  bool bf16;
  bool offload;
  bool hybrid;
  Accumulate accumulate;
  bool checkpointed;
  bool frozen;
};

inline std::string name_of(const Combination& c) {
  std::ostringstream name;
  name << "Reshard" << std::array{"True", "False", "Fewer"}[static_cast<int>(c.reshard)] << (c.bf16 ? "_Bf16" : "_Fp32")
       << (c.offload ? "_Offload" : "") << (c.hybrid ? "_Hybrid" : "")
       << std::array{"", "_NoSync", "_NoAllReduce"}[static_cast<int>(c.accumulate)]
       << (c.checkpointed ? "_Checkpointed" : "") << (c.frozen ? "_Frozen" : "");
  return name.str();
}

inline std::vector<Combination> all() {
  std::vector<Combination> all;
  for (auto reshard : {Reshard::kTrue, Reshard::kFalse, Reshard::kFewer}) {
    for (int bits = 0; bits < 32; ++bits) {
      for (auto accumulate : {Accumulate::kNone, Accumulate::kNoSync, Accumulate::kNoAllReduce}) {
        all.push_back(
            {reshard,
             (bits & 1) != 0,
             (bits & 2) != 0,
             (bits & 4) != 0,
             accumulate,
             (bits & 8) != 0,
             (bits & 16) != 0});
      }
    }
  }
  return all;
}

/// Those in which so many options meet in every way.
inline std::vector<Combination> some(const std::vector<Combination>& of, int together) {
  return selected(of, together, [](const Combination& c) -> std::vector<int> {
    const int reshard = static_cast<int>(c.reshard), accumulate = static_cast<int>(c.accumulate);
    return {reshard, accumulate, c.bf16, c.offload, c.hybrid, c.checkpointed, c.frozen};
  });
}

inline Subject make_subject(const Combination& combination) {
  Subject subject = subjects::tied(combination.checkpointed);
  if (combination.frozen) {
    for (auto& item : subject.module->named_parameters()) {
      if (item.key().find("fc.") != std::string::npos) {
        item.value().set_requires_grad(false);
      }
    }
  }
  return subject;
}

inline Arrangement arrangement_of(const Combination& combination, int ranks) {
  return combination.hybrid ? Arrangement{.shards = 2, .replicas = 2} : Arrangement{.shards = ranks};
}

inline FullyShardOptions options_of(const Combination& combination, int ranks) {
  FullyShardOptions options;
  if (combination.reshard == Reshard::kFewer) {
    options.reshard_after_forward = std::max(1, arrangement_of(combination, ranks).shards / 2);
  } else {
    options.reshard_after_forward = combination.reshard == Reshard::kTrue;
  }
  if (combination.bf16) {
    options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  }
  if (combination.offload) {
    options.offload_policy = CPUOffloadPolicy{};
  }
  return options;
}

inline Trial trial_of(const Combination& combination, int ranks) {
  return {
      .make = [combination] { return make_subject(combination); },
      .options = options_of(combination, ranks),
      .accumulate = combination.accumulate,
      .steps = 3};
}

/// Of unsharded training, which knows of no resharding, and has the same bits with checkpoints and without: many
/// combinations have one in common.
inline const Reference& reference_of(Combination combination, int ranks, int steps) {
  static std::map<std::tuple<bool, bool, bool, bool, Accumulate, int, int>, Reference> references;
  combination.checkpointed = false;
  const auto key = std::tuple(
      combination.bf16,
      combination.offload,
      combination.hybrid,
      combination.frozen,
      combination.accumulate,
      ranks,
      steps);
  auto found = references.find(key);
  if (found == references.end()) {
    Trial trial = trial_of(combination, ranks);
    trial.steps = steps;
    found = references.emplace(key, train_unsharded(trial, arrangement_of(combination, ranks))).first;
  }
  return found->second;
}

} // namespace fsdp::testing::combinations
