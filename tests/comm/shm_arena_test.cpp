#include "comm/shm/arena.h"

#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/process.h"
#include "comm/shm/segment.h"
#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::shm {
namespace {

using testing::contains;
using testing::error_message;
using testing::on_processes;

constexpr size_t kMebibyte = size_t{1} << 20;

// In a process of its own: the allocator stays for the rest of a process's life.
void with_arena(const std::function<void(Arena&)>& body, const std::map<std::string, std::string>& environment = {}) {
  on_processes(
      1,
      [&] {
        Arena& arena = Arena::of_process();
        arena.offer_to_tensors(1);
        arena.serve_tensors();
        body(arena);
      },
      {.environment = environment});
}

size_t shared_memory_in_use() {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("RssShmem:", 0) == 0) {
      return std::stoul(line.substr(9)) * 1024;
    }
  }
  return 0;
}

TEST(Arena, HoldsBigTensorsOnly) {
  const auto body = [] {
    const at::Tensor before = at::ones({int64_t{1} << 20});
    Arena& arena = Arena::of_process();
    arena.offer_to_tensors(1);
    const at::Tensor not_yet = at::ones({int64_t{1} << 20});
    arena.serve_tensors();
    const at::Tensor small = at::ones({100});
    const at::Tensor big = at::ones({int64_t{1} << 20});
    EXPECT_FALSE(arena.contains(before.data_ptr()));
    EXPECT_FALSE(arena.contains(not_yet.data_ptr()));
    EXPECT_FALSE(arena.contains(small.data_ptr()));
    EXPECT_TRUE(arena.contains(big.data_ptr()));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(big.data_ptr()) % 4096, 0u);
    EXPECT_EQ(at::add(before, big).sum().item<float>(), 2 * 1048576.f);
  };
  on_processes(1, body);
}

TEST(Arena, BlocksComeBack) {
  with_arena([](Arena& arena) {
    const size_t before = arena.bytes_in_use();
    const void* first = nullptr;
    for (int i = 0; i < 5; ++i) {
      const at::Tensor tensor = at::empty({int64_t{1} << 20});
      first = first ? first : tensor.data_ptr();
      EXPECT_EQ(tensor.data_ptr(), first);
      EXPECT_GE(arena.bytes_in_use(), before + 4 * kMebibyte);
    }
    EXPECT_EQ(arena.bytes_in_use(), before);
  });
}

TEST(Arena, ServesOneDnnAndResizes) {
  with_arena([](Arena&) {
    const at::Tensor input = at::rand({8, 16, 64, 64});
    const at::Tensor weight = at::rand({32, 16, 3, 3});
    const at::Tensor output = at::conv2d(input, weight);
    EXPECT_TRUE(at::isfinite(output).all().item<bool>());
    at::Tensor grows = at::ones({40'000});
    grows.resize_({400'000});
    EXPECT_EQ(grows.narrow(0, 0, 40'000).sum().item<float>(), 40'000.f);
  });
}

TEST(Arena, BeyondTheCapTensorsLieElsewhere) {
  with_arena(
      [](Arena& arena) {
        const at::Tensor fits = at::empty({3 << 18});
        const at::Tensor does_not = at::empty({3 << 18});
        EXPECT_TRUE(arena.contains(fits.data_ptr()));
        EXPECT_FALSE(arena.contains(does_not.data_ptr()));
      },
      {{"FSDP_ARENA_MB", "4"}});
}

TEST(Arena, TensorsLeaveRoomForWhatIsCopiedForOthers) {
  const size_t gibibyte = size_t{1} << 30;
  EXPECT_EQ(Arena::share_for_tensors(64 * gibibyte, 2, 128 * gibibyte), 24 * gibibyte);
  EXPECT_EQ(Arena::share_for_tensors(4096 * gibibyte, 2, 128 * gibibyte), 96 * gibibyte) << "of the addresses";
}

TEST(Arena, ThreadsMayShareIt) {
  with_arena([](Arena& arena) {
    const size_t before = arena.bytes_in_use();
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([t] {
        std::mt19937 random(static_cast<unsigned>(t));
        std::vector<at::Tensor> tensors;
        for (int i = 0; i < 300; ++i) {
          const float mark = static_cast<float>(t * 1000 + i);
          tensors.push_back(at::full({40'000 + static_cast<int64_t>(random() % 100'000)}, mark));
          if (tensors.size() > 8) {
            const size_t victim = random() % tensors.size();
            const at::Tensor& tensor = tensors[victim];
            EXPECT_TRUE(tensor.eq(tensor[0]).all().item<bool>()) << "another tensor wrote here";
            tensors.erase(tensors.begin() + static_cast<long>(victim));
          }
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    EXPECT_EQ(arena.bytes_in_use(), before);
  });
}

TEST(Arena, KeepsMemoryOnlyWhenAskedTo) {
  with_arena([](Arena& arena) {
    const size_t before = shared_memory_in_use();
    const int64_t numel = int64_t{64} << 18; // 64 MiB
    at::ones({numel});
    EXPECT_LT(shared_memory_in_use(), before + 8 * kMebibyte) << "given back at once";
    auto keeping = arena.keep_freed();
    at::ones({numel});
    EXPECT_GT(shared_memory_in_use(), before + 56 * kMebibyte) << "kept for the next step";
    keeping.reset();
    EXPECT_LT(shared_memory_in_use(), before + 8 * kMebibyte);
    for (int i = 0; i < 200; ++i) {
      at::ones({int64_t{1} << 18});
    }
    std::vector<at::Tensor> many;
    for (int i = 0; i < 64; ++i) {
      many.push_back(at::ones({int64_t{1} << 18}));
    }
    many.clear();
    EXPECT_LT(shared_memory_in_use(), before + 24 * kMebibyte) << "small blocks are kept up to a bound";
  });
}

TEST(Segments, MoreThanTheLimitOnFileSizesIsAnError) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{.rlim_cur = 1 << 20, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto said = error_message([] { Segment::create("fsdp-test", 2 << 20, Access::kReadAndWrite); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(contains(said, "ulimit -f"));
}

TEST(Processes, WithoutFileDescriptorsNobodyHasEnded) {
  const auto start = process_start(getpid());
  ASSERT_TRUE(start);
  EXPECT_TRUE(has_ended(getpid(), *start + 1));
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const bool said = has_ended(getpid(), *start + 1);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_FALSE(said);
}

// As programs do that become daemons; the next file that they open has its number.
TEST(Processes, OneWhoseDescriptorTheProgramClosedHasNotEnded) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
  }
  const int next = dup(STDERR_FILENO);
  close(next);
  const WatchedProcess process(child, process_start(child).value());
  ASSERT_GE(dup2(STDERR_FILENO, next), 0);
  EXPECT_FALSE(process.ended()) << "of a file one can always read or write";
  close(next);
  EXPECT_FALSE(process.ended()) << "of none";
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(process.ended());
}

int status_of(pid_t child) {
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(Arena, AForkedChildHasItsOwnMemory) {
  with_arena([](Arena& arena) {
    at::Tensor tensor = at::ones({1 << 18});
    const pid_t child = fork();
    if (child == 0) {
      const bool inherited = tensor.sum().item<float>() == static_cast<float>(1 << 18);
      tensor.fill_(7);
      const at::Tensor fresh = at::ones({1 << 18});
      const bool elsewhere = !arena.contains(fresh.data_ptr());
      const bool adds_up = fresh.add(tensor).eq(8).all().item<bool>();
      const pid_t childs_child = fork();
      if (childs_child == 0) {
        _exit(tensor.eq(7).all().item<bool>() ? 0 : 1);
      }
      _exit(inherited && elsewhere && adds_up && status_of(childs_child) == 0 ? 0 : 1);
    }
    EXPECT_EQ(status_of(child), 0);
    EXPECT_TRUE(tensor.eq(1).all().item<bool>()) << "the child's writes came through";
  });
}

} // namespace
} // namespace fsdp::shm
