// Ranks as processes: the same numbers over every backend, and errors instead of hangs when a rank is lost.

#include <csignal>

#include <sys/types.h>
#include <unistd.h>

#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class Processes : public ::testing::TestWithParam<int> {};

void train_on_processes(const char* backend, const Trial& trial, int ranks) {
  // Every process works out the reference for itself.
  on_processes(ranks, [&] {
    const Arrangement arrangement{ranks};
    const auto reference = train_unsharded(trial, arrangement);
    init({.backend = backend, .device = "cpu"});
    train_sharded(trial, reference);
    shutdown();
  });
}

TEST_P(Processes, SharedMemoryGivesTheBitsOfUnshardedTraining) {
  train_on_processes("shm", {.make = [] { return subjects::tied(); }, .steps = 5}, GetParam());
}

TEST_P(Processes, GlooGivesThemToo) {
  train_on_processes("gloo", {.make = [] { return subjects::tied(); }, .steps = 5}, GetParam());
}

TEST_P(Processes, GlooWithPrecisionOffloadAndResharding) {
  FullyShardOptions options{
      .reshard_after_forward = GetParam() % 2 == 0 ? ReshardAfterForward(2) : ReshardAfterForward(true),
      .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat},
      .offload_policy = CPUOffloadPolicy{}};
  train_on_processes("gloo", {.make = [] { return subjects::tied(); }, .options = options, .steps = 3}, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Ranks, Processes, ::testing::Values(1, 2, 3, 4));

enum class Moment { kForward, kBackward, kOptimizer };

class LostRank : public ::testing::TestWithParam<Moment> {};

// The others end within seconds, with an error that names who is missing and where.
TEST_P(LostRank, EndsTheOthersWithAnError) {
  const Moment moment = GetParam();
  ProcessOptions process_options;
  process_options.lost = {1};
  on_processes(
      3,
      [&] {
        init({.backend = "shm", .device = "cpu", .timeout = std::chrono::seconds(60)});
        auto subject = make_seeded({.make = [] { return subjects::tied(); }});
        for (auto& part : subject.parts) {
          fully_shard(*part);
        }
        fully_shard(*subject.module);
        torch::optim::AdamW optimizer(parameters(*subject.module));
        const auto begun = std::chrono::steady_clock::now();
        std::string message;
        try {
          for (int step = 0; step < 50; ++step) {
            const bool now = step == 3 && process_rank() == 1;
            if (now && moment == Moment::kForward) {
              kill(getpid(), SIGKILL);
            }
            auto loss = subject.loss(process_rank(), step);
            if (now && moment == Moment::kBackward) {
              loss.register_hook([](at::Tensor) -> at::Tensor {
                kill(getpid(), SIGKILL);
                return {};
              });
            }
            loss.backward();
            if (now && moment == Moment::kOptimizer) {
              kill(getpid(), SIGKILL);
            }
            optimizer.step();
            optimizer.zero_grad();
          }
        } catch (const CommError& error) {
          message = error.what();
        }
        const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
        EXPECT_LT(seconds, 10);
        EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
        EXPECT_NE(message.find("unit '"), std::string::npos) << message;
      },
      process_options);
}

INSTANTIATE_TEST_SUITE_P(Moments, LostRank, ::testing::Values(Moment::kForward, Moment::kBackward, Moment::kOptimizer));

TEST(Divergence, RanksThatReduceDifferentUnitsGetAnErrorThatNamesBoth) {
  std::mutex mutex;
  std::string messages;
  EXPECT_THROW(
      on_threads(
          2,
          [&] {
            nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
            fully_shard(*model[0]);
            fully_shard(*model[1]);
            fully_shard(*model);
            try {
              model[rank()]->as<nn::Linear>()->forward(torch::ones({2, 4})).sum().backward();
            } catch (const CommError& error) {
              std::lock_guard lock(mutex);
              messages += error.what();
              throw;
            }
          },
          std::chrono::seconds(10)),
      CommError);
  EXPECT_NE(messages.find("'0'"), std::string::npos) << messages;
  EXPECT_NE(messages.find("'1'"), std::string::npos) << messages;
}

} // namespace
} // namespace fsdp::testing
