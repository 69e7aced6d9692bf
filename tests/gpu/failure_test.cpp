// Ranks that are lost while others wait for them on the GPU: an error, and soon.

#include <chrono>
#include <csignal>

#include "gpu/gpus.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

class LossOnGpus : public OnGpus {
 protected:
  /// What the rank that is left gets told when the other ends, or stops.
  static void lose(int signal, seconds timeout, seconds at_most) {
    ProcessOptions options;
    options.lost = {1};
    options.environment = {{"FSDP_TIMEOUT", std::to_string(timeout.count())}};
    on_gpus(
        2,
        [=] {
          const Subject subject = make_seeded({.make = [] { return subjects::tied(); }});
          for (const auto& part : subject.parts) {
            fully_shard(*part);
          }
          fully_shard(*subject.module);
          torch::optim::SGD optimizer(parameters(*subject.module), 0.1);
          const auto step = [&](int number) {
            optimizer.zero_grad();
            const auto loss = subject.loss(rank(), number);
            loss.backward();
            optimizer.step();
            return loss.item<float>(); // the host waits for the GPU
          };
          for (int number = 0; number < 3; ++number) {
            step(number);
          }
          if (rank() == 1) {
            raise(signal);
          }
          const auto begin = steady_clock::now();
          const auto said = error_message([&] {
            for (int number = 3; steady_clock::now() < begin + at_most; ++number) {
              step(number);
            }
          });
          const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(steady_clock::now() - begin);
          std::cout << "after " << took.count() << " ms: " << said << std::endl;
          EXPECT_LT(took, at_most);
          EXPECT_TRUE(contains(said, "rank 0 of 2"));
          EXPECT_TRUE(contains(said, "over nccl"));
          std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
        },
        options);
  }
};

// The host waits for the GPU in it; that this ends is not enough.
TEST_F(LossOnGpus, OfAStoppedRankIsAnErrorOfABarrier) {
  ProcessOptions options;
  options.lost = {1};
  options.environment = {{"FSDP_TIMEOUT", "10"}};
  on_gpus(
      2,
      [] {
        barrier();
        if (rank() == 1) {
          raise(SIGSTOP);
        }
        EXPECT_TRUE(contains(error_message<CommError>([] { barrier(); }), "failed, or took too long"));
        std::_Exit(::testing::Test::HasFailure() ? 1 : 0);
      },
      options);
}

TEST_F(LossOnGpus, OfAKilledRankIsAnError) {
  lose(SIGKILL, seconds(20), seconds(40));
}

TEST_F(LossOnGpus, OfAStoppedRankIsAnErrorAfterTheTimeout) {
  lose(SIGSTOP, seconds(10), seconds(40));
}

} // namespace
} // namespace fsdp::testing
