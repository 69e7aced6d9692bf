// Random models, units, options and steps, with something in between: sharded training is unsharded training, bit for
// bit, whatever comes together. A seed alone decides what a trial is, and it may be run by itself:
//   FSDP_TRIALS_SEED=17 FSDP_TRIALS=1 OMP_NUM_THREADS=1 build/tests/random_test

#include "nn/random_sharded.h"

namespace fsdp::testing::random {
namespace {

Mesh mesh_of(const Arrangement& arrangement) {
  if (arrangement.replicas == 1) {
    return init_device_mesh("cpu", {arrangement.shards}, {"shard"});
  }
  return init_device_mesh("cpu", {arrangement.replicas, arrangement.shards}, {"replicate", "shard"});
}

void run_beside_unsharded(const Program& program, BlockImpl& start) {
  const auto notes = Unsharded(program, start, c10::kCPU).run();
  on_threads(program.arrangement.ranks(), [&] {
    Sharded(program, start, mesh_of(program.arrangement), notes[static_cast<size_t>(rank())]).run();
    barrier();
  });
}

TEST(Random, TrialsTrainAsUnsharded) {
  run_trials(100, {}, run_beside_unsharded);
}

TEST(Random, TrialsOfFlatUnitsTrainAsUnsharded) {
  run_trials(60, {.flat = true}, run_beside_unsharded);
}

} // namespace
} // namespace fsdp::testing::random
