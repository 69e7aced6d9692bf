// Combinations of the options, each beside the unsharded reference.

#include "nn/combinations.h"

namespace fsdp::testing::combinations {
namespace {

class Combinations : public ::testing::TestWithParam<Combination> {};

TEST_P(Combinations, TrainAsUnsharded) {
  const Trial trial = trial_of(GetParam(), /*ranks=*/2);
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
    All,
    Combinations,
    ::testing::ValuesIn(some(all(), /*together=*/4)),
    [](const ::testing::TestParamInfo<Combination>& info) { return name_of(info.param); });

// Over shared memory a gather moves nothing, so that where whole parameters stay changes little; over Gloo they travel.
TEST(CombinationsOverGloo, TrainAsUnsharded) {
  const auto train_all = [] {
    init({.backend = "gloo", .device = "cpu"});
    const auto hybrid = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    for (const auto& combination : some(all(), /*together=*/3)) {
      SCOPED_TRACE(name_of(combination));
      Trial trial = trial_of(combination, /*ranks=*/4);
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
} // namespace fsdp::testing::combinations
