#include "comm/c10d/collectives.h"

#include <limits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "comm/c10d/factory.h"
#include "comm/recording_backend.h"
#include "support/scoped_environment.h"

namespace fsdp::testing {
namespace {

using adapter::Collectives;

struct World {
  explicit World(int size) : backend(c10::make_intrusive<RecordingBackend>(0, size)) {}

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& call : backend->calls) {
      names.push_back(call.name);
    }
    return names;
  }
  int64_t bytes() const {
    int64_t bytes = 0;
    for (const auto& call : backend->calls) {
      bytes += call.bytes;
    }
    return bytes;
  }

  c10::intrusive_ptr<RecordingBackend> backend;
  Collectives collectives{process_group_of(backend), std::chrono::seconds(1)};
};

void reduce_scatter(World& world, c10::ScalarType dtype) {
  world.collectives.reduce_scatter(at::zeros({4}, dtype), at::zeros({8}, dtype));
}

TEST(Collectives, ARefusedDtypeIsReplacedAndTheOthersAreNot) {
  World world(2);
  world.backend->before = [](const Recorded& call) {
    TORCH_CHECK(call.dtype != at::kHalf || call.name == "allreduce", "not today"); // in no words that we know
  };
  reduce_scatter(world, at::kHalf);
  reduce_scatter(world, at::kFloat);
  reduce_scatter(world, at::kHalf);
  EXPECT_EQ(world.names(), (std::vector<std::string>{"allreduce", "_reduce_scatter_base", "allreduce"}));
}

TEST(Collectives, WhatIsLackingIsAskedForOnce) {
  World world(2);
  int asked = 0;
  world.backend->before = [&](const Recorded& call) {
    asked += call.name == "_reduce_scatter_base" ? 1 : 0;
    TORCH_CHECK(call.name != "_reduce_scatter_base", "no");
  };
  reduce_scatter(world, at::kFloat);
  reduce_scatter(world, at::kFloat);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(world.names(), (std::vector<std::string>{"reduce_scatter", "reduce_scatter"}));
}

TEST(Collectives, FailuresAreNotTakenForALack) {
  World world(2);
  world.backend->before = [](const Recorded&) { C10_THROW_ERROR(DistNetworkError, "does not support this"); };
  EXPECT_THROW(reduce_scatter(world, at::kFloat), c10::DistNetworkError);
  world.backend->before = [](const Recorded&) {};
  reduce_scatter(world, at::kFloat);
  world.backend->before = [](const Recorded&) { TORCH_CHECK(false, "does not support this any more"); };
  EXPECT_THROW(reduce_scatter(world, at::kFloat), c10::Error);
  EXPECT_EQ(world.names(), std::vector<std::string>{"_reduce_scatter_base"});
}

/// So many numbers at an address that nobody reads.
at::Tensor untouched(int64_t count, c10::ScalarType dtype) {
  alignas(64) static char memory[64];
  return at::from_blob(memory, {count}, dtype);
}

TEST(Collectives, NoCountExceeds32Bits) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMany = 3 * (kMost - 7) / 8 * 8 + 16; // as bytes: not one message, but whole words
  for (const int64_t count : {kMany, kMany + 3}) {
    World world(2);
    const auto small = untouched(count, at::kByte), big = untouched(2 * count, at::kByte);
    world.collectives.all_gather(big, small);
    EXPECT_EQ(world.bytes(), 2 * count);
    world.collectives.all_gather_each({big}, {small});
    EXPECT_EQ(world.bytes(), 4 * count);
    world.collectives.broadcast(small, 0);
    EXPECT_EQ(world.bytes(), 5 * count);
    world.collectives.all_reduce(small, ReduceOp::kMax);
    EXPECT_EQ(world.bytes(), 6 * count);
    world.collectives.reduce_scatter(small, big);
    EXPECT_EQ(world.bytes(), 7 * count);
    if (count == kMany) {
      world.collectives.all_to_all(big, big);
      EXPECT_EQ(world.bytes(), 9 * count);
    }
    for (const auto& call : world.backend->calls) {
      EXPECT_LE(call.count, kMost) << call.name;
    }
  }
}

int64_t bytes_of_all_reduce(int ranks, const at::Tensor& tensor) {
  const ScopedEnvironment unchecked(std::map<std::string, std::string>{{"FSDP_CHECK_ORDER", "0"}});
  const World world(ranks);
  const auto group = Group::from(process_group_of(world.backend));
  group->all_reduce(tensor, ReduceOp::kSum, 1, {"test", ""})->wait();
  return world.bytes();
}

// Which no backend on the host combines: it is done here.
TEST(Collectives, AnAllReduceOfHalfNumbersReceivesTwiceItsBytes) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    for (const int ranks : {2, 16, 1024}) {
      const int64_t bytes = 1 << 20;
      EXPECT_LE(bytes_of_all_reduce(ranks, at::ones({bytes / 2}, dtype)), 2 * bytes) << ranks << " ranks";
    }
    EXPECT_LE(bytes_of_all_reduce(1024, at::ones({16}, dtype)), 1024 * 32) << "small: one message";
  }
}

} // namespace
} // namespace fsdp::testing
