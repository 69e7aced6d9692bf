#include <functional>

#include "comm/group_checks.h"
#include "comm/shm_backends.h"
#include "support/paused_memory.h"

/// Reads of other ranks' memory that a failure overlaps.
namespace fsdp::testing {
namespace {

constexpr int64_t kNumel = 40'000;

using Collective = std::function<void(Group& group, const at::Tensor& whole, const at::Tensor& result)>;

struct Read {
  std::string name;
  Collective run;
};

const Read kReads[] = {
    {"ReduceScatter",
     [](Group& group, const at::Tensor& whole, const at::Tensor& result) {
       const int64_t chunk = kNumel / 2;
       group.reduce_scatter({{whole}, {{whole.numel(), chunk}}, {result.narrow(0, 0, chunk)}}, kTest)->wait();
     }},
    {"AllReduce",
     [](Group& group, const at::Tensor& whole, const at::Tensor& result) {
       group.all_reduce(group.rank() == 0 ? result : whole, ReduceOp::kSum, 1, kTest)->wait();
     }},
    {"Broadcast",
     [](Group& group, const at::Tensor& whole, const at::Tensor& result) {
       group.broadcast(group.rank() == 0 ? result : whole, /*root=*/1, kTest);
     }},
};

class ShmOverlap : public ::testing::TestWithParam<Read> {};

// Rank 0 is paused where it has read and writes its first result. Rank 1 gives up, and its memory becomes another's.
TEST_P(ShmOverlap, WhatWasReadWhileTheGroupFailedIsNotDelivered) {
  PausedMemory paused(kNumel * sizeof(float));
  const at::Tensor result = at::from_blob(paused.data(), {kNumel});
  const at::Tensor given = at::ones({kNumel});
  std::thread gives_up;
  on_threads(2, [&] {
    const auto group = current_world()->group;
    if (group->rank() == 1) {
      gives_up = std::thread([&paused, group, given] {
        paused.await_writer();
        group->abort("out of memory");
        given.fill_(1000);
        paused.go_on();
      });
    }
    const at::Tensor whole = group->rank() == 1 ? given : at::ones({kNumel});
    const std::string message = comm_error([&] { GetParam().run(*group, whole, result); });
    EXPECT_TRUE(mentions(message, "out of memory"));
  });
  gives_up.join();
}

INSTANTIATE_TEST_SUITE_P(Reads, ShmOverlap, ::testing::ValuesIn(kReads), [](const auto& info) {
  return info.param.name;
});

// Lets the writer go on when the thread that has it ends.
struct LetsGoAtTheEnd {
  PausedMemory* memory = nullptr;
  ~LetsGoAtTheEnd() {
    memory->go_on();
  }
};

// Nothing would end rank 1's wait but its limit.
TEST(ShmOverlaps, ARankThatGoesWaitsForReadersNoLongerThanTheLimit) {
  PausedMemory paused(kNumel * sizeof(float));
  const at::Tensor result = at::from_blob(paused.data(), {kNumel});
  const at::Tensor given = at::ones({kNumel});
  const auto body = [&] {
    const auto group = current_world()->group;
    const auto reduce = [&](const at::Tensor& whole, const at::Tensor& slices) {
      return group->reduce_scatter({{whole}, {{kNumel, kNumel / 2}}, {slices.narrow(0, 0, kNumel / 2)}}, kTest);
    };
    if (group->rank() == 1) {
      thread_local LetsGoAtTheEnd at_the_end;
      at_the_end.memory = &paused;
      const auto work = reduce(given, at::empty({kNumel}));
      paused.await_writer();
      group->abort("out of memory");
      return;
    }
    EXPECT_TRUE(mentions(comm_error([&] { reduce(at::ones({kNumel}), result)->wait(); }), "out of memory"));
  };
  on_threads(2, body, std::chrono::seconds(12));
}

TEST(ShmOverlaps, AGatherThatAFailureOverlapsIsNotDelivered) {
  enum { kBegun, kGathered, kFailed };
  std::atomic<int> state = kBegun;
  const auto reach = [&](int next) {
    state = next;
    state.notify_all();
  };
  on_threads(2, [&] {
    const auto group = current_world()->group;
    const auto home = group->make_home({piece(1000, 500, at::kFloat)}, {}, kTest);
    home->gather(kTest)->wait();
    group->barrier(kTest);
    if (group->rank() == 1) {
      state.wait(kBegun);
      group->abort("out of memory");
      reach(kFailed);
      return;
    }
    const auto gathered = home->gather(kTest);
    reach(kGathered);
    state.wait(kGathered);
    EXPECT_TRUE(mentions(comm_error([&] { gathered->wait(); }), "out of memory"));
  });
}

} // namespace
} // namespace fsdp::testing
