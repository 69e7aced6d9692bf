#include <csignal>
#include <functional>
#include <stdexcept>

#include <sys/resource.h>

#include "comm/group_checks.h"
#include "comm/shm_backends.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

constexpr int kVictim = 1;
const Label kOperation{"reduce gradients", "blocks.3"};
using Prelude = std::function<void()>; // what the victim does instead of taking part

// The ways in which a rank waits for others. `before` is called once everything is set up.
struct Wait {
  std::string name;
  std::function<void(Group& group, const Prelude& before)> run;
};

std::vector<Piece> one_piece(int ranks) {
  return {piece(1000, even_chunk(1000, ranks), at::kFloat)};
}

void begin_write(Group& group, const Prelude& before) {
  const auto home = group.make_home(one_piece(group.size()), {}, kTest);
  fill_slices(group, *home, one_piece(group.size()), 1);
  home->gather(kTest)->wait();
  group.barrier(kTest);
  before();
  home->begin_write(kOperation);
}

void gather(Group& group, const Prelude& before) {
  const auto home = group.make_home(one_piece(group.size()), {}, kTest);
  before();
  home->gather(kOperation)->wait();
}

void gather_converted(Group& group, const Prelude& before) {
  const auto home = group.make_home({piece(1000, even_chunk(1000, group.size()), at::kFloat, at::kHalf)}, {}, kTest);
  before();
  home->gather(kOperation)->wait();
}

const Wait kWaits[] = {
    {"Barrier",
     [](Group& group, const Prelude& before) {
       before();
       group.barrier(kOperation);
     }},
    {"ReduceScatter",
     [](Group& group, const Prelude& before) {
       before();
       start_reduce(group, {.numels = {300'000}}, kOperation).work->wait();
     }},
    {"AllReduce",
     [](Group& group, const Prelude& before) {
       before();
       group.all_reduce(at::zeros({100'000}), ReduceOp::kSum, 1, kOperation)->wait();
     }},
    {"Broadcast",
     [](Group& group, const Prelude& before) {
       before();
       group.broadcast(at::zeros({100'000}), kVictim, kOperation);
     }},
    {"MakeHome",
     [](Group& group, const Prelude& before) {
       before();
       group.make_home(one_piece(group.size()), {}, kOperation);
     }},
    {"Split",
     [](Group& group, const Prelude& before) {
       before();
       group.split(0, kOperation);
     }},
    {"BeginWrite", &begin_write},
    {"Gather", &gather},
    {"GatherConverted", &gather_converted},
};

// Calls `wait` where the victim does not come; returns what the others are told.
std::string message_without_victim(Group& group, const Wait& wait, const Prelude& victim) {
  const auto nothing = [] {};
  const auto start = std::chrono::steady_clock::now();
  const std::string message = comm_error([&] { wait.run(group, group.rank() == kVictim ? victim : Prelude(nothing)); });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
  EXPECT_TRUE(mentions(message, "reduce gradients"));
  EXPECT_TRUE(mentions(message, "'blocks.3'"));
  EXPECT_TRUE(mentions(message, "rank 1"));
  return message;
}

// A reduction that will not end; null if the group has failed already.
std::unique_ptr<Work> start_reduce_or_fail(Group& group) {
  try {
    return start_reduce(group, {.numels = {100}}).work;
  } catch (const CommError&) {
    return nullptr;
  }
}

class ShmFailure : public ::testing::TestWithParam<Wait> {};

TEST_P(ShmFailure, DeadProcessIsNoticed) {
  const auto body = [] {
    const auto group = join_processes(process_folder());
    const std::string message = message_without_victim(*group, GetParam(), [] { std::raise(SIGKILL); });
    EXPECT_TRUE(mentions(message, "rank 1 has died"));
    comm_error([&] { group->barrier(kTest); }); // ever after
  };
  on_processes(3, body, {.lost = {kVictim}});
}

TEST_P(ShmFailure, StoppedProcessIsNoticed) {
  const auto body = [] {
    const auto group = join_processes(process_folder(), std::chrono::seconds(8));
    const std::string message = message_without_victim(*group, GetParam(), [] { std::raise(SIGSTOP); });
    EXPECT_TRUE(mentions(message, "gave no sign for 8 s"));
  };
  on_processes(3, body, {.lost = {kVictim}});
}

TEST_P(ShmFailure, ExceptionOfAThreadStopsTheOthers) {
  const auto body = [] {
    const auto group = current_world()->group;
    const bool throws = group->rank() == kVictim;
    const auto take_part = [&] {
      GetParam().run(*group, [&] { throws ? throw std::runtime_error("the disk is full") : void(); });
    };
    if (throws) {
      take_part();
    }
    EXPECT_TRUE(mentions(comm_error(take_part), "by rank 1: the disk is full"));
  };
  try {
    on_threads(3, body);
    FAIL() << "expected the exception of the rank that threw it";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the disk is full");
  }
}

TEST_P(ShmFailure, LeavingEarlyIsNoticed) {
  if (GetParam().name == "Gather") {
    GTEST_SKIP() << "needs nothing more of it: WhatARankWroteBeforeItLeftCanBeRead";
  }
  struct Left {};
  const auto body = [] {
    const auto group = current_world()->group;
    if (group->rank() == kVictim) {
      try {
        GetParam().run(*group, [] { throw Left(); });
      } catch (const Left&) {
      }
      return;
    }
    EXPECT_TRUE(mentions(message_without_victim(*group, GetParam(), [] {}), "rank 1 has left the group"));
  };
  on_threads(3, body);
}

// It has written all that it ever will.
TEST(ShmFailures, WhatARankWroteBeforeItLeftCanBeRead) {
  on_threads(3, [] {
    const auto group = current_world()->group;
    const auto pieces = one_piece(group->size());
    const auto home = group->make_home(pieces, {}, kTest);
    fill_slices(*group, *home, pieces, 1);
    if (group->rank() != kVictim) {
      const auto gathered = home->gather(kTest);
      gathered->wait();
      expect_pieces(*gathered, pieces, 1);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Waits, ShmFailure, ::testing::ValuesIn(kWaits), [](const ::testing::TestParamInfo<Wait>& info) {
      return info.param.name;
    });

// It has lent them to the others, of whom some read them meanwhile.
TEST(ShmFailures, ARankThatDiesWithGradientsPostedIsNoticed) {
  for (int i = 0; i < 5; ++i) {
    const auto body = [] {
      const auto group = join_processes(process_folder());
      const auto reduced = start_reduce(*group, {.numels = {300'000}}, kOperation);
      if (process_rank() == kVictim) {
        raise(SIGKILL);
      }
      const auto message = comm_error([&] {
        reduced.work->wait();
        group->barrier(kOperation);
      });
      EXPECT_TRUE(mentions(message, "rank 1")) << message;
      EXPECT_TRUE(mentions(message, "'blocks.3'")) << message;
    };
    on_processes(3, body, {.lost = {kVictim}});
  }
}

TEST(ShmFailures, LastOperationOfTheDeadIsNamed) {
  const auto body = [] {
    const auto group = join_processes(process_folder());
    group->barrier({"unshard", "blocks.2"});
    if (group->rank() == 1) {
      std::raise(SIGKILL);
    }
    const std::string message = comm_error([&] { group->barrier(kOperation); });
    EXPECT_EQ(
        message,
        "[reduce gradients] rank 0 waited for rank 1 in unit 'blocks.3': rank 1 has died (its last operation: unshard "
        "of "
        "'blocks.2')");
  };
  on_processes(2, body, {.lost = {1}});
}

// Rank 0 waits for rank 1, which waits for rank 2.
TEST(ShmFailures, TheSilentRankAtTheEndOfTheChainIsBlamed) {
  const auto body = [] {
    const auto group = join_processes(process_folder(), std::chrono::seconds(8));
    if (group->rank() == 2) {
      std::raise(SIGSTOP);
    }
    const std::string message = comm_error([&] { group->barrier(kOperation); });
    EXPECT_TRUE(mentions(message, "rank 2 gave no sign"));
  };
  on_processes(3, body, {.lost = {2}});
}

// Rank 0 looks at all that it depends on, also while it waits for rank 1, which computes until rank 0 has been told.
TEST(ShmFailures, DeadProcessIsNoticedBehindABusyOne) {
  const auto body = [] {
    const auto group = join_processes(process_folder());
    const auto told = process_folder() / "told", busy = process_folder() / "busy";
    const auto wait_for = [](const std::filesystem::path& sign) {
      while (!std::filesystem::exists(sign)) {
        std::this_thread::yield();
      }
    };
    group->barrier(kTest);
    if (group->rank() == 2) {
      wait_for(busy); // else rank 1 may still be in the barrier
      std::raise(SIGKILL);
    }
    if (group->rank() == 1) {
      std::filesystem::create_directories(busy);
      wait_for(told);
    }
    const std::string message = comm_error([&] { group->barrier(kOperation); });
    EXPECT_TRUE(mentions(message, "rank 2 has died"));
    std::filesystem::create_directories(told);
  };
  on_processes(3, body, {.timeout = std::chrono::seconds(30), .lost = {2}});
}

TEST(ShmFailures, FailureOfASplitGroupReachesItsParent) {
  const auto body = [] {
    const auto world = current_world()->group;
    const std::string message = comm_error([&] { // as soon as in `split`, for a slow rank
      const auto part = world->split(world->rank() / 2, kTest);
      if (world->rank() == 0) {
        part->abort("rank 0 is out of memory");
      }
      world->barrier(kTest);
    });
    EXPECT_TRUE(mentions(message, "rank 0 is out of memory"));
  };
  on_threads(4, body);
}

TEST(ShmFailures, NothingIsPendingInAFailedGroup) {
  const auto body = [] {
    const auto group = current_world()->group;
    if (group->rank() == 1) {
      group->abort("enough");
      return;
    }
    auto pending = start_reduce_or_fail(*group);
    comm_error([&] { group->barrier(kTest); });
    EXPECT_TRUE(!pending || pending->done()) << "a wait would throw, not block";
    comm_error([&] { pending ? pending->wait() : group->barrier(kTest); });
  };
  on_threads(2, body);
}

// Who sends to nobody's ear is told at the next operation of all.
TEST(ShmFailures, BroadcastsFromDifferentRanksAreToldApart) {
  const auto body = [] {
    const auto group = current_world()->group;
    const std::string message = comm_error([&] {
      group->broadcast(at::ones({3}), group->rank(), kTest);
      group->barrier(kTest);
    });
    EXPECT_TRUE(mentions(message, "did not agree in what they called before it"));
  };
  on_threads(2, body);
}

TEST(ShmFailures, ReductionsWithDifferentDivisorsAreToldApart) {
  const auto body = [] {
    const auto group = current_world()->group;
    const std::string message = comm_error(
        [&] { start_reduce(*group, {.numels = {10}, .divide_by = 1.0 + group->rank()}, kTest).work->wait(); });
    EXPECT_TRUE(mentions(message, "must agree"));
  };
  on_threads(2, body);
}

TEST(ShmFailures, TensorsElsewhereAreErrorsAndHarmless) {
  const auto body = [] {
    const auto group = current_world()->group;
    const at::Tensor elsewhere = at::zeros({10}, at::device(at::kMeta));
    const at::Tensor slice = at::zeros({5}, at::device(at::kMeta));
    EXPECT_THROW(group->all_reduce(elsewhere, ReduceOp::kSum, 1, kTest), Error);
    EXPECT_THROW(group->broadcast(elsewhere, 0, kTest), Error);
    EXPECT_THROW(group->reduce_scatter({{elsewhere}, {{10, 5}}, {slice}, 1}, kTest), Error);
    group->barrier(kTest);
  };
  on_threads(2, body);
}

TEST(ShmFailures, GatheringsInAnotherOrderAreToldApart) {
  const auto body = [] {
    const auto group = current_world()->group;
    const std::vector<Piece> pieces{piece(1000, even_chunk(1000, group->size()), at::kFloat, at::kHalf)};
    const auto first = group->make_home(pieces, {}, kTest);
    const auto second = group->make_home(pieces, {}, kTest);
    const bool odd = group->rank() == 1;
    const std::string message = comm_error([&] {
      const auto gathered = (odd ? second : first)->gather({"unshard", odd ? "head" : "wte"});
      gathered->wait();
    });
    EXPECT_TRUE(mentions(message, "unshard of 'wte'"));
    EXPECT_TRUE(mentions(message, "unshard of 'head'"));
  };
  on_threads(2, body);
}

void limit_files(rlim_t bytes) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  limit.rlim_cur = bytes;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

// Ranks of the other part too, which have theirs.
TEST(ShmFailures, APartThatOneRankCannotMakeIsAnErrorOnAll) {
  on_processes(4, [] {
    const auto group = join_processes(process_folder());
    rlimit before{};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
    if (process_rank() == 1) { // the first of its part, which makes what the others open
      limit_files(0);
    }
    const std::string said = error_message([&] { group->split(process_rank() % 2, kTest); });
    limit_files(before.rlim_cur);
    EXPECT_TRUE(contains(said, "ulimit -f")) << said;
    EXPECT_EQ(group->split(process_rank() % 2, kTest)->size(), 2); // all know, so they may go on
    group->barrier(kTest);
  });
}

// And not that it has no memory which the others could open.
TEST(ShmFailures, WhyARankCannotJoinIsToldByAll) {
  on_processes(3, [] {
    if (process_rank() == kVictim) {
      limit_files(1 << 20); // no arena is as small
    }
    const std::string said = error_message([] { join_processes(process_folder()); });
    EXPECT_TRUE(contains(said, "ulimit -f")) << said;
  });
}

} // namespace
} // namespace fsdp::testing
