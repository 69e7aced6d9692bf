// A model that is larger than memory.

#include <fstream>
#include <new>

#include <malloc.h>
#include <sys/resource.h>

#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

constexpr int64_t kMebibyte = 1 << 20;
constexpr int64_t kWidth = 512;
constexpr int kDepth = 16;
constexpr int64_t kModel = (6 * kWidth * kWidth + 6 * kWidth) * 4 * kDepth; // bytes: 96 MiB
constexpr int64_t kRoom = 64 * kMebibyte; // for what a process makes from now on
static_assert(3 * kRoom <= 2 * kModel);

/// Tensors are the process's own, and none of them in memory that ranks share, for which the limit is not.
const ProcessOptions kPrivateMemory{.environment = {{"FSDP_ARENA_MB", "0"}}};

/// What is freed goes back to the system at once: else the holes in the heap decide, which are others each time.
void give_freed_memory_back() {
  mallopt(M_MMAP_THRESHOLD, 1 << 16);
  mallopt(M_ARENA_MAX, 1);
}

/// Of this process, which the limit is for: everything that it can write and that is its own.
int64_t data_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmData:", 0) == 0) {
      return std::stoll(line.substr(7)) * 1024;
    }
  }
  throw std::runtime_error("no VmData");
}

class DataLimit {
 public:
  explicit DataLimit(int64_t room) {
    getrlimit(RLIMIT_DATA, &before_);
    rlimit limited = before_;
    limited.rlim_cur = data_bytes() + room;
    setrlimit(RLIMIT_DATA, &limited);
  }
  ~DataLimit() {
    setrlimit(RLIMIT_DATA, &before_);
  }
  DataLimit(const DataLimit&) = delete;
  DataLimit& operator=(const DataLimit&) = delete;

 private:
  rlimit before_{};
};

using Blocks = torch::nn::Sequential;

Blocks make_blocks(int depth, int64_t width) {
  Blocks blocks;
  for (int i = 0; i < depth; ++i) {
    blocks->push_back(subjects::Block(width));
  }
  return blocks;
}

void shard(Blocks& blocks) {
  for (const auto& block : *blocks) {
    fully_shard(*block.ptr());
  }
  fully_shard(blocks);
}

std::vector<float> train(Blocks& blocks, int64_t width) {
  torch::optim::SGD optimizer(blocks->parameters(), 1e-3);
  std::vector<float> losses;
  for (int step = 0; step < 3; ++step) {
    const auto loss = blocks->forward(subjects::data(rank(), step, {2, width})).pow(2).mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<float>());
  }
  return losses;
}

/// Whether the program had too little memory.
template <typename Make>
bool does_not_fit(const Make& make) {
  try {
    make();
  } catch (const std::bad_alloc&) {
    return true;
  } catch (const c10::Error& error) {
    return std::string(error.what()).find("allocate") != std::string::npos;
  }
  return false;
}

TEST(DeferredMemory, AModelLargerThanMemoryIsBuiltAndTrained) {
  on_processes(
      4,
      [] {
        give_freed_memory_back();
        init({.device = "cpu"});
        auto small = make_blocks(2, 8); // threads begin, with their stacks
        shard(small);
        train(small, 8);
        barrier();
        torch::manual_seed(1);
        auto blocks = [] {
          const DataLimit limit(kRoom);
          EXPECT_TRUE(does_not_fit([] { make_blocks(kDepth, kWidth); }));
          torch::manual_seed(1);
          auto blocks = deferred_init([] { return make_blocks(kDepth, kWidth); });
          shard(blocks);
          return blocks;
        }();
        std::vector<float> losses;
        {
          const DataLimit limit(kRoom);
          losses = train(blocks, kWidth);
        }
        blocks = nullptr;
        torch::manual_seed(1);
        auto ordinary = make_blocks(kDepth, kWidth);
        shard(ordinary);
        EXPECT_EQ(train(ordinary, kWidth), losses);
        shutdown();
      },
      kPrivateMemory);
}

TEST(DeferredMemory, AUnitLargerThanMemoryIsMadeOneParameterAfterAnother) {
  on_processes(
      4,
      [] {
        give_freed_memory_back();
        init({.device = "cpu"});
        torch::manual_seed(1);
        const auto first = make_blocks(1, kWidth)->named_parameters();
        torch::manual_seed(1);
        auto blocks = [] {
          const DataLimit limit(kRoom);
          auto blocks = deferred_init([] { return make_blocks(kDepth, kWidth); });
          fully_shard(blocks);
          return blocks;
        }();
        for (const auto& item : first) {
          EXPECT_TRUE(whole_of(*blocks, item.key()).equal(item.value())) << item.key();
        }
        shutdown();
      },
      kPrivateMemory);
}

TEST(DeferredMemory, WhatAParameterIsMadeOfGoesWithItsLastUse) {
  on_processes(
      1,
      [] {
        give_freed_memory_back();
        constexpr int64_t kNumel = 2 * kMebibyte; // 8 MiB
        const auto make = [] {
          auto module = std::make_shared<torch::nn::Module>();
          auto sum = module->register_buffer("sum", torch::zeros({kNumel}));
          for (int i = 0; i < 20; ++i) {
            sum.add_(torch::rand({kNumel}));
          }
          return module;
        };
        torch::manual_seed(1);
        const auto ordinary = make();
        torch::manual_seed(1);
        const auto module = deferred_init(make);
        {
          const DataLimit limit(48 * kMebibyte);
          materialize(module);
        }
        EXPECT_TRUE(module->buffers()[0].equal(ordinary->buffers()[0]));
      },
      kPrivateMemory);
}

} // namespace
} // namespace fsdp::testing
