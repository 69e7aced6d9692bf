// Ranks as processes: the same numbers over every backend, and errors instead of hangs when a rank is lost.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include <malloc.h>
#include <sys/types.h>
#include <unistd.h>

#include "comm/launcher.h"
#include "comm/rendezvous.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/file_exchange.h"
#include "support/memory.h"

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
  train_on_processes("shm", {.make = [] { return subjects::tied(); }}, GetParam());
}

TEST_P(Processes, GlooGivesThemToo) {
  train_on_processes("gloo", {.make = [] { return subjects::tied(); }}, GetParam());
}

TEST_P(Processes, GlooWithPrecisionOffloadAndResharding) {
  FullyShardOptions options{
      .reshard_after_forward = GetParam() % 2 == 0 ? ReshardAfterForward(2) : ReshardAfterForward(true),
      .mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat},
      .offload_policy = CPUOffloadPolicy{}};
  train_on_processes("gloo", {.make = [] { return subjects::tied(); }, .options = options, .steps = 3}, GetParam());
}

// Big enough for the arena, where the others read them in place.
TEST_P(Processes, GradientsThatAreNotCopiedGiveThemToo) {
  const MakeSubject wide = [] {
    nn::Sequential model(nn::Linear(7, 257), nn::GELU(), nn::Linear(257, 259), nn::Tanh(), nn::Linear(259, 3));
    return subjects::subject_of(
        model.ptr(),
        [model](int rank, int step) mutable {
          return model->forward(subjects::data(rank, step, {4, 7})).pow(2).mean();
        },
        {model[0], model[2]});
  };
  train_on_processes("shm", {.make = wide}, GetParam());
}

// What the neighbours keep between forward and backward is the former value once the shards were written.
TEST_P(Processes, WritesEndWhatNeighboursKeep) {
  const int ranks = GetParam();
  on_processes(ranks, [&] {
    init({.backend = "gloo", .device = "cpu"});
    const auto linear = [] { return nn::Linear(nn::LinearOptions(4, 4).bias(false)); };
    nn::Sequential model(linear(), linear(), linear(), linear());
    auto first = std::dynamic_pointer_cast<nn::LinearImpl>(model[0]);
    torch::NoGradGuard no_grad;
    first->weight.fill_(1);
    const FullyShardOptions options{
        .reshard_after_forward = ranks % 2 == 0 ? ReshardAfterForward(ranks / 2) : ReshardAfterForward(true)};
    for (const auto& layer : *model) {
      fully_shard(*layer.ptr(), options);
    }
    fully_shard(*model);
    const auto x = torch::ones({1, 4});
    for (int step = 1; step < 5; ++step) {
      model->forward(x); // leaves the first unit with the neighbours
      EXPECT_EQ(first->weight.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(), nullptr);
      auto shard = first->parameters()[0];
      step % 2 == 0 ? shard.set_data(shard + 1) : static_cast<void>(shard.add_(1));
      EXPECT_TRUE(first->forward(x).eq(4 * (1 + step)).all().item<bool>()) << step;
    }
    barrier();
    shutdown();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Processes, ::testing::Values(1, 2, 3, 4));

enum class Moment { kRendezvous, kSharding, kForward, kBackward, kReduce, kOptimizer };

struct Loss {
  const char* backend;
  Moment moment;
  int signal;
  int rank = 1;
};

/// Sends the signal to the rank that is to be lost, when its moment has come.
class Victim {
 public:
  explicit Victim(const Loss& loss) : loss_(loss) {}

  void at(Moment moment) const {
    if (process_rank() == loss_.rank && moment == loss_.moment) {
      kill(getpid(), loss_.signal);
    }
  }
  /// The same, where all ranks are behind what they did together before: who was not would be told there.
  void when_all_are_at(Moment moment) {
    if (moment != loss_.moment) {
      return;
    }
    std::ofstream(here(process_rank()));
    for (int rank = 0; process_rank() == loss_.rank && rank < world_size(); ++rank) {
      for (int i = 0; i < 60000 && !std::filesystem::exists(here(rank)); ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    at(moment);
  }
  /// The step begins in which it is lost.
  void comes_near() {
    near_since_ = std::chrono::steady_clock::now();
  }
  /// Since then, or since the rank began.
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - near_since_).count();
  }
  /// Comes, and is lost before it has said what the others wait for next.
  void at_rendezvous() const {
    if (process_rank() == loss_.rank && loss_.moment == Moment::kRendezvous) {
      const Rendezvous arrived(read_launch(), std::chrono::seconds(60));
      at(Moment::kRendezvous);
    }
  }

 private:
  static std::filesystem::path here(int rank) {
    return process_folder() / ("here-" + std::to_string(rank));
  }

  Loss loss_;
  std::chrono::steady_clock::time_point near_since_ = std::chrono::steady_clock::now();
};

void train_until_lost(const Loss& loss, Victim& victim) {
  InitOptions options{.backend = loss.backend, .device = "cpu"};
  if (loss.signal == SIGSTOP) { // What has died is noticed at once; what is stopped by the timeout.
    options.timeout = std::chrono::seconds(12);
  }
  victim.at_rendezvous();
  init(options);
  auto subject = make_seeded({.make = [] { return subjects::tied(); }});
  for (auto& part : subject.parts) {
    fully_shard(*part);
    victim.at(Moment::kSharding);
  }
  auto root = fully_shard(*subject.module);
  torch::optim::AdamW optimizer(parameters(*subject.module));
  for (int step = 0; step < 50; ++step) {
    const bool now = step == 3;
    if (now) {
      victim.comes_near();
      root.set_all_reduce_hook([&victim](at::Tensor&) { victim.at(Moment::kReduce); });
      victim.when_all_are_at(Moment::kForward);
    }
    auto value = subject.loss(process_rank(), step);
    if (now) {
      value.register_hook([&victim](at::Tensor) -> at::Tensor {
        victim.when_all_are_at(Moment::kBackward);
        return {};
      });
    }
    value.backward();
    if (now) {
      victim.when_all_are_at(Moment::kOptimizer);
    }
    optimizer.step();
    optimizer.zero_grad();
  }
}

/// Files in the system's folder for shared memory that could be ours. (A folder there is for ports.)
std::set<std::string> shared_files() {
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().string();
    if (name.find("fsdp") != std::string::npos && !entry.is_directory()) {
      files.insert(name);
    }
  }
  return files;
}

/// What may stand at the beginning of a survivor's message, and the unit that it names.
struct Place {
  std::vector<std::string> operations;
  std::string unit;
};

Place expected_place(const Loss& loss) {
  const bool shares_memory = std::string(loss.backend) == "shm"; // its gathers wait for nobody once all have written
  switch (loss.moment) {
    case Moment::kRendezvous:
      return {{"init"}, ""};
    case Moment::kSharding:
      return {{"fully_shard"}, "fsdp::testing::subjects::BlockImpl"};
    case Moment::kForward:
      return {{"unshard"}, "(root)"};
    case Moment::kBackward: // a slower survivor may be told in its next gather
      return {{"reduce gradients", "unshard"}, "blocks.2"};
    case Moment::kReduce: // of the last unit, which others may not have behind them
      return {{"reduce gradients", shares_memory ? "end of backward" : "unshard"}, ""};
    case Moment::kOptimizer:
      return {{shares_memory ? "write shards" : "unshard"}, "(root)"};
  }
  return {};
}

void expect_place(const std::string& message, const Place& place) {
  const bool named = std::any_of(place.operations.begin(), place.operations.end(), [&](const auto& operation) {
    return message.rfind("[" + operation + "]", 0) == 0;
  });
  EXPECT_TRUE(named) << "not while [" << place.operations.front() << "]: " << message;
  if (!place.unit.empty()) {
    EXPECT_NE(message.find("unit '" + place.unit + "'"), std::string::npos) << message;
  }
}

/// Of what the shared-memory group maps.
void expect_nothing_mapped() {
  for (const char* name : {"fsdp-home", "fsdp-gathered", "fsdp-group"}) {
    EXPECT_TRUE(mappings(name).empty()) << name << " is still mapped";
  }
}

class LostRank : public ::testing::TestWithParam<Loss> {};

// The others end within seconds, with an error that names who is missing and where, and keep no memory.
TEST_P(LostRank, EndsTheOthersWithAnError) {
  const Loss loss = GetParam();
  const auto files = shared_files();
  const auto body = [&] {
    Victim victim(loss);
    std::string message;
    try {
      train_until_lost(loss, victim);
    } catch (const Error& error) {
      message = error.what();
    }
    FileExchange(process_folder(), process_rank() - (process_rank() > loss.rank ? 1 : 0), 2)(""); // both have been told
    shutdown();
    EXPECT_LT(victim.seconds(), 60) << "of minutes, which it has else";
    EXPECT_NE(message.find("rank " + std::to_string(loss.rank)), std::string::npos) << message;
    expect_place(message, expected_place(loss));
    // What a backward that broke off had queued, LibTorch keeps until the next one on the thread.
    torch::ones({1}, torch::requires_grad()).sum().backward();
    expect_nothing_mapped();
  };
  ProcessOptions process_options;
  process_options.lost = {loss.rank};
  on_processes(3, body, process_options);
  EXPECT_EQ(shared_files(), files);
}

std::vector<Loss> losses(int signal, const std::vector<Moment>& moments) {
  std::vector<Loss> all;
  for (const char* backend : {"shm", "gloo"}) {
    for (const auto moment : moments) {
      all.push_back({backend, moment, signal});
    }
  }
  return all;
}

const std::vector<Moment> kMoments = {
    Moment::kRendezvous, Moment::kSharding, Moment::kForward, Moment::kBackward, Moment::kReduce, Moment::kOptimizer};

std::string name_of_loss(const ::testing::TestParamInfo<Loss>& info) {
  static const char* names[] = {"Rendezvous", "Sharding", "Forward", "Backward", "Reduce", "Optimizer"};
  const std::string rank = info.param.rank == 1 ? "" : "_Rank" + std::to_string(info.param.rank);
  return std::string(info.param.backend) + names[static_cast<int>(info.param.moment)] + rank;
}

INSTANTIATE_TEST_SUITE_P(Killed, LostRank, ::testing::ValuesIn(losses(SIGKILL, kMoments)), name_of_loss);
INSTANTIATE_TEST_SUITE_P( // which serves the others' rendezvous
    KilledFirst,
    LostRank,
    ::testing::Values(
        Loss{"shm", Moment::kForward, SIGKILL, 0},
        Loss{"shm", Moment::kReduce, SIGKILL, 0},
        Loss{"gloo", Moment::kForward, SIGKILL, 0},
        Loss{"gloo", Moment::kReduce, SIGKILL, 0}),
    name_of_loss);
INSTANTIATE_TEST_SUITE_P(
    Stopped, LostRank, ::testing::ValuesIn(losses(SIGSTOP, {Moment::kForward, Moment::kReduce})), name_of_loss);

TEST_P(Processes, ModelsOfOtherKindsTrainInSharedMemory) {
  for (const auto make : {&subjects::convolutions, &subjects::recurrent, &subjects::odd}) {
    train_on_processes("shm", {.make = make}, GetParam());
  }
}

// Of all ranks. Nobody goes on before all have looked.
double memory_of_ranks(const std::string& mapping = "") {
  malloc_trim(0);
  barrier();
  const double mine = mapping.empty() ? proportional_mebibytes_of_no_file() : proportional_mebibytes(mapping);
  const at::Tensor sum = torch::full({1}, mine, torch::kDouble);
  default_mesh().group()->all_reduce(sum, ReduceOp::kSum, 1, {"sum memory", ""})->wait();
  return sum.item<double>();
}

nn::Sequential sharded_layers(int count, int64_t width) {
  nn::Sequential model;
  for (int i = 0; i < count; ++i) {
    model->push_back(nn::Linear(nn::LinearOptions(width, width).bias(false)));
    fully_shard(*model[i]);
  }
  fully_shard(*model);
  return model;
}

TEST(MemoryOfProcesses, ParametersAreThereOnceAndAllGoesWithTheModel) {
  on_processes(3, [] {
    init({.backend = "shm", .device = "cpu"});
    const auto input = torch::ones({2, 2048});
    sharded_layers(2, 2048)->forward(input).sum().backward(); // what is allocated once
    const double start = memory_of_ranks();
    {
      auto model = sharded_layers(4, 2048);
      {
        c10::NoGradGuard no_grad;
        model->forward(input);
      }
      EXPECT_NEAR(memory_of_ranks("memfd:fsdp-home"), 64, 0.5) << "the parameters, though each rank has read all";
#ifndef __SANITIZE_THREAD__ // which keeps a memory beside the memory, and what was freed
      EXPECT_LT(memory_of_ranks() - start, 64 + 56) << "what the model was built in is gone, but for some idle memory";
#endif
      model->forward(input).sum().backward();
      EXPECT_GT(memory_of_ranks() - start, 64 + 60) << "with gradients";
    }
#ifndef __SANITIZE_THREAD__
    EXPECT_LT(memory_of_ranks() - start, 8);
#endif
    shutdown();
  });
}

TEST(MemoryOfProcesses, AllGoesWithTheModelOverGlooToo) {
  on_processes(2, [] {
    mallopt(M_ARENA_MAX, 1); // malloc_trim does not trim the arenas of Gloo's threads
    init({.backend = "gloo", .device = "cpu"});
    const auto input = torch::ones({2, 2048});
    sharded_layers(1, 64)->forward(torch::ones({2, 64})).sum().backward(); // what is allocated once
    const double start = memory_of_ranks();
    {
      auto model = sharded_layers(4, 2048);
      torch::optim::AdamW optimizer(model->parameters());
      model->forward(input).sum().backward();
      optimizer.step();
      EXPECT_GT(memory_of_ranks() - start, 64 * 3) << "shards and the optimizer's state";
    }
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) // which keep what was freed
    EXPECT_LT(memory_of_ranks() - start, 12);
#endif
    shutdown();
  });
}

// A stray write to a parameter must not reach the other ranks.
TEST(MemoryOfProcesses, WholeParametersAreMappedForReadingOnly) {
  on_processes(2, [] {
    init({.backend = "shm", .device = "cpu"});
    nn::Linear model(nn::LinearOptions(2048, 2048).bias(false));
    fully_shard(*model).unshard();
    const auto whole = mapping_of(model->weight.const_data_ptr());
    EXPECT_NE(whole.name.find("memfd:fsdp-home"), std::string::npos) << whole.name;
    EXPECT_EQ(whole.permissions, "r--s");
    const auto own = mapping_of(model->parameters()[0].const_data_ptr());
    EXPECT_NE(own.name.find("memfd:fsdp-home"), std::string::npos) << own.name;
    EXPECT_EQ(own.permissions, "rw-s");
    barrier();
    shutdown();
  });
}

/// Each rank's own message names what both were about to do.
void expect_divergence(const std::string& message, const std::string& operation) {
  for (const char* unit : {"'0'", "'1'"}) {
    EXPECT_NE(message.find(operation + " of " + unit), std::string::npos) << "rank " << rank() << ": " << message;
  }
}

std::string divergence_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const CommError& error) {
    return error.what();
  }
  return "no error";
}

nn::Sequential two_units(const FullyShardOptions& options = {}) {
  nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4));
  fully_shard(*model[0], options);
  fully_shard(*model[1], options);
  fully_shard(*model, options);
  return model;
}

at::Tensor run_own_unit(nn::Sequential& model) {
  return model[rank()]->as<nn::Linear>()->forward(torch::ones({2, 4})).sum();
}

TEST(Divergence, RanksThatReduceDifferentUnitsAreTold) {
  on_threads(
      2,
      [] {
        auto model = two_units();
        expect_divergence(divergence_of([&] { run_own_unit(model).backward(); }), "reduce gradients");
      },
      std::chrono::seconds(60));
}

const FullyShardOptions kCastOnTheWay{.mp_policy = {.param_dtype = torch::kBFloat16}};

TEST(Divergence, RanksThatGatherDifferentUnitsAreTold) {
  on_threads(
      2,
      [] {
        auto model = two_units(kCastOnTheWay);
        expect_divergence(divergence_of([&] { run_own_unit(model); }), "unshard");
      },
      std::chrono::seconds(60));
}

TEST(Divergence, SoAreProcesses) {
  for (const char* backend : {"shm", "gloo"}) {
    on_processes(2, [&] {
      init({.backend = backend, .device = "cpu", .timeout = std::chrono::seconds(60)});
      auto model = two_units(kCastOnTheWay);
      expect_divergence(divergence_of([&] { run_own_unit(model); }), "unshard");
    });
  }
}

} // namespace
} // namespace fsdp::testing
