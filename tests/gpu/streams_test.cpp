// The host runs ahead of the GPU, and what is on several streams is in order.

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include "base/stream.h"
#include "engine/runtime.h"
#include "gpu/gpus.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

class RanksOnStreams : public OnGpus, public ::testing::WithParamInterface<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, RanksOnStreams, ::testing::Values(1, 2), ::testing::PrintToStringParamName());

/// Keeps the current stream busy for longer than the host needs for a step.
void keep_busy(const c10::Device& device) {
  const auto matrix = torch::ones({8192, 8192}, torch::TensorOptions().device(device));
  auto product = matrix;
  for (int i = 0; i < 40; ++i) {
    product = torch::mm(matrix, product);
  }
}

// Everything that the GPU has to do before the step is still to be done when the step has been queued.
TEST_P(RanksOnStreams, TheHostWaitsNowhereInAStep) {
  on_gpus(
      GetParam(),
      [] {
        for (const bool bf16 : {false, true}) {
          SCOPED_TRACE(bf16 ? "bf16" : "fp32");
          const Subject subject = make_seeded({.make = [] { return subjects::tied(); }});
          FullyShardOptions options;
          if (bf16) {
            options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
          }
          for (const auto& part : subject.parts) {
            fully_shard(*part, options);
          }
          fully_shard(*subject.module, options);
          torch::optim::SGD optimizer(parameters(*subject.module), 0.1);
          const auto step = [&](int number) {
            optimizer.zero_grad();
            subject.loss(rank(), number).backward();
            optimizer.step();
          };
          for (int warm_up = 0; warm_up < 3; ++warm_up) {
            step(warm_up);
          }
          keep_busy(device());
          synchronize(current_stream(device()));
          barrier();
          keep_busy(device());
          Event busy;
          busy.record(current_stream(device()));
          step(3);
          EXPECT_FALSE(busy.query());
        }
      },
      {.environment = {{"FSDP_CHECK_ORDER", "0"}}}); // which asks for page-locked memory in each of the first steps
}

// A step on a stream of the program's own, which no other stream waits for.
TEST_P(RanksOnStreams, TrainOnAStreamOfTheProgramsOwn) {
  on_gpus(GetParam(), [] {
    const Arrangement arrangement{GetParam()};
    const Trial trial{.make = [] { return subjects::tied(); }};
    const auto reference = train_unsharded(trial, arrangement);
    const StreamGuard on_its_own(new_stream(device()));
    train_sharded(trial, reference);
  });
}

// Two streams in turns, each of which waits for the other as programs make them.
TEST_P(RanksOnStreams, TrainOnTwoStreamsInTurns) {
  on_gpus(GetParam(), [] {
    const Arrangement arrangement{GetParam()};
    Trial trial{.make = [] { return subjects::tied(); }};
    const auto reference = train_unsharded(trial, arrangement);
    const Stream streams[] = {new_stream(device()), new_stream(device())};
    trial.make = [&streams] {
      Subject subject = subjects::tied();
      subject.loss = [&streams, loss = subject.loss](int rank, int step) {
        const Stream before = current_stream(device());
        const Stream& mine = streams[step % 2];
        wait_stream(mine, before);
        const StreamGuard guard(mine);
        auto value = loss(rank, step);
        wait_stream(before, mine);
        return value;
      };
      return subject;
    };
    train_sharded(trial, reference);
  });
}

} // namespace
} // namespace fsdp::testing
