// Every combination of the options, each beside the unsharded reference.

#include <map>
#include <sstream>
#include <tuple>

#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

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

std::string name_of(const Combination& c) {
  std::ostringstream name;
  name << "Reshard" << std::array{"True", "False", "Fewer"}[static_cast<int>(c.reshard)] << (c.bf16 ? "_Bf16" : "_Fp32")
       << (c.offload ? "_Offload" : "") << (c.hybrid ? "_Hybrid" : "")
       << std::array{"", "_NoSync", "_NoAllReduce"}[static_cast<int>(c.accumulate)]
       << (c.checkpointed ? "_Checkpointed" : "") << (c.frozen ? "_Frozen" : "");
  return name.str();
}

std::vector<Combination> all_combinations() {
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

Subject make_subject(const Combination& combination) {
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

FullyShardOptions options_of(const Combination& combination) {
  FullyShardOptions options;
  if (combination.reshard == Reshard::kFewer) {
    options.reshard_after_forward = combination.hybrid ? 1 : 2; // of two, or of four
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

Trial trial_of(const Combination& combination) {
  return {
      .make = [&] { return make_subject(combination); },
      .options = options_of(combination),
      .accumulate = combination.accumulate,
      .steps = 3};
}

Arrangement arrangement_of(const Combination& combination, int ranks) {
  return combination.hybrid ? Arrangement{.shards = 2, .replicas = 2} : Arrangement{.shards = ranks};
}

/// Of unsharded training, which knows of no resharding and no offload, and has the same bits with checkpoints and
/// without: many combinations have one in common.
const Reference& reference_of(Combination combination, int ranks, int steps) {
  static std::map<std::tuple<bool, bool, bool, Accumulate, int, int>, Reference> references;
  combination.checkpointed = false;
  const auto key =
      std::tuple(combination.bf16, combination.hybrid, combination.frozen, combination.accumulate, ranks, steps);
  auto found = references.find(key);
  if (found == references.end()) {
    Trial trial = trial_of(combination);
    trial.steps = steps;
    found = references.emplace(key, train_unsharded(trial, arrangement_of(combination, ranks))).first;
  }
  return found->second;
}

class Combinations : public ::testing::TestWithParam<Combination> {};

TEST_P(Combinations, TrainAsUnsharded) {
  const Trial trial = trial_of(GetParam());
  const auto& reference = reference_of(GetParam(), /*ranks=*/2, trial.steps);
  on_threads(arrangement_of(GetParam(), /*ranks=*/2).ranks(), [&] {
    Trial mine = trial;
    if (GetParam().hybrid) {
      mine.options.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    }
    train_sharded(mine, reference);
  });
}

INSTANTIATE_TEST_SUITE_P(
    All, Combinations, ::testing::ValuesIn(all_combinations()), [](const ::testing::TestParamInfo<Combination>& info) {
      return name_of(info.param);
    });

// Over shared memory a gather moves nothing, so that where whole parameters stay changes little; over Gloo they travel.
TEST(CombinationsOverGloo, TrainAsUnsharded) {
  const auto train_all = [] {
    init({.backend = "gloo", .device = "cpu"});
    const auto hybrid = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    for (const auto& combination : all_combinations()) {
      SCOPED_TRACE(name_of(combination));
      Trial trial = trial_of(combination);
      trial.steps = 2;
      const auto& reference = reference_of(combination, /*ranks=*/4, trial.steps);
      if (combination.hybrid) {
        trial.options.mesh = hybrid;
      }
      train_sharded(trial, reference);
    }
    shutdown();
  };
  on_processes(4, train_all, {.timeout = std::chrono::minutes(8)}); // with sanitizers it takes two
}

} // namespace
} // namespace fsdp::testing
