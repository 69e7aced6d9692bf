#include <memory>

#include <gtest/gtest.h>

#include "comm/protocol/trainer.h"
#include "support/selected.h"

/// The shared-memory protocol in every order of the ranks' steps: no rank reads what is older than what the others have
/// published, or what is being written; none waits for ever; when one goes, all others end.
namespace fsdp::testing {
namespace {

// -- right programs

void train(Trainer& me) {
  me.step();
  me.step();
  me.gather(1);
}

TEST(Protocol, TrainingReadsWhatWasWrittenLast) {
  expect_right(&train);
}

TEST(Protocol, ARankReadsAloneBetweenStepsAndBeforeItsOwnOptimizerStep) {
  expect_right([](Trainer& me) {
    me.step();
    me.gather_all();
    if (me.rank() == 0) {
      me.release();
      me.gather(1);
      me.gather(0);
    }
    me.write_all();
    if (me.rank() == 1) {
      me.gather(1);
    }
    me.gather_all();
  });
}

TEST(Protocol, EvaluationBetweenSteps) {
  expect_right([](Trainer& me) {
    me.step();
    me.gather_all();
    me.release();
    me.gather(1);
    me.step();
    me.gather(0);
  });
}

TEST(Protocol, ABarrierInTheMidstOfAPhase) {
  expect_right([](Trainer& me) {
    me.gather_all();
    me.write(0);
    me.barrier();
    me.write(1);
    me.gather_all();
    me.write(0);
    me.gather(0);
  });
}

TEST(Protocol, ARankReadsAloneBesideABarrier) {
  expect_right([](Trainer& me) {
    me.step();
    if (me.rank() == 0) {
      me.gather(0);
    }
    me.barrier();
    if (me.rank() == 2) {
      me.gather(1);
    }
    me.step();
    me.barrier();
    if (me.rank() == 1) {
      me.gather(1);
    }
  });
}

TEST(Protocol, GradientsAreReducedWhileParametersAreRead) {
  expect_right([](Trainer& me) {
    me.gather(0);
    at::Tensor gradients;
    const auto work = me.reduce(gradients);
    me.write(1);
    me.wait_for(*work, gradients);
  });
}

TEST(Protocol, ANewHomeIsMadeInTheMidstOfAPhase) {
  const Explored explored = explore({.ranks = 2}, [] {
    Trainer me;
    me.make(0);
    exploring::start();
    me.write(0);
    exploring::operation();
    me.make(1);
    me.write(1);
  });
  EXPECT_EQ(explored.violation, "");
}

TEST(Protocol, GatheringWithACast) {
  const Explored explored = explore({}, [] {
    Trainer me(c10::kBFloat16);
    me.make_all();
    exploring::start();
    me.step();
    me.gather(1);
  });
  EXPECT_EQ(explored.violation, "");
}

void reduce_twice(Trainer& me) {
  me.reduce_scatter();
  me.reduce_scatter();
}

TEST(Protocol, GradientsAreReadWhereTheyLieUntilAllHaveReadThem) {
  expect_right(&reduce_twice);
}

TEST(Protocol, GradientsAreReadWhereTheyLieBetweenGathersAndWrites) {
  expect_right([](Trainer& me) {
    me.gather(0);
    me.reduce_scatter();
    me.write(0);
    me.gather(0);
  });
}

// -- ranks that go

void train_once(Trainer& me) {
  me.gather(0);
  me.write(0);
  me.gather(1);
  me.barrier();
}

TEST(Protocol, AllRanksEndWhereverOneDies) {
  expect_right(&train_once, {.may_fail = true, .mortal = 1});
}

TEST(Protocol, AllRanksEndWhereverOneDiesWithGradientsOnTheirWay) {
  expect_right(
      [](Trainer& me) {
        at::Tensor gradients;
        const auto work = me.reduce(gradients);
        me.wait_for(*work, gradients);
      },
      {.may_fail = true, .mortal = 1});
}

TEST(Protocol, AllRanksEndWhereverOneDiesWhileOthersReadItsGradients) {
  expect_right([](Trainer& me) { me.reduce_scatter(); }, {.may_fail = true, .mortal = 1});
}

TEST(Protocol, AllRanksEndWhereverOneDiesWhileOthersCast) {
  const Explored explored = explore({.may_fail = true, .mortal = 1}, [] {
    Trainer me(c10::kBFloat16);
    me.make_all();
    exploring::start();
    me.gather(0);
    me.write(0);
    me.gather(0);
  });
  EXPECT_EQ(explored.violation, "");
  EXPECT_GT(explored.errors, 0);
}

TEST(Protocol, AllRanksEndWhereverOneAborts) {
  for (int operation = 0; operation < 4; ++operation) {
    expect_right(
        [operation](Trainer& me) {
          if (me.rank() == 1) {
            me.abort_at(operation);
          }
          train_once(me);
        },
        {.may_fail = true});
  }
}

// -- falling asleep, step by step

TEST(Protocol, NoWakeUpIsLost) {
  expect_right(&train_once, {.ranks = 2, .wake_ups = true});
}

TEST(Protocol, ADeathIsNoticedAtEveryStepOfFallingAsleep) {
  expect_right(&train_once, {.ranks = 2, .may_fail = true, .mortal = 1, .wake_ups = true});
}

constexpr const char* kTakesMinutes = "takes minutes: FSDP_ALL_COMBINATIONS=1 runs it";

void write_once(Trainer& me) {
  me.write(0);
}

TEST(Protocol, NoWakeUpIsLostAmongThree) {
  if (!wants_all_combinations()) {
    GTEST_SKIP() << kTakesMinutes;
  }
  expect_right(
      [](Trainer& me) {
        write_once(me);
        me.gather(0);
      },
      {.wake_ups = true});
}

TEST(Protocol, ADeathIsNoticedAtEveryStepOfFallingAsleepAmongThree) {
  if (!wants_all_combinations()) {
    GTEST_SKIP() << kTakesMinutes;
  }
  expect_right(&write_once, {.may_fail = true, .mortal = 1, .wake_ups = true});
}

// -- mistakes

using Wrong = Mistake::Kind;

void write_and_read(Trainer& me) {
  me.step();
  me.gather_all();
}

TEST(TheExplorerFinds, AWriterThatDoesNotAwaitTheReaders) {
  expect_found(
      {Wrong::kNotAwaited, &shm::RankSlot::writing},
      "read version 2 of rank 1's slice of unit 0, expected 1",
      &write_and_read);
}

TEST(TheExplorerFinds, AWriterThatDoesNotSaySo) {
  expect_found({Wrong::kNeverSet, &shm::RankSlot::writing}, "nobody can go on", &write_and_read);
}

TEST(TheExplorerFinds, AReaderThatDoesNotAwaitTheWriters) {
  expect_found({Wrong::kNotAwaited, &shm::RankSlot::published}, "rank 1 read version 1 of rank", &write_and_read);
}

TEST(TheExplorerFinds, AGatherThatDoesNotPublish) {
  expect_found({Wrong::kNeverSet, &shm::RankSlot::published}, "rank 0 waited for rank 1", &write_and_read);
}

TEST(TheExplorerFinds, WordsThatAreWrittenAfterTheyArePromised) {
  expect_found({Wrong::kSetTooEarly, &shm::RankSlot::posted}, "where rank 1 calls", [](Trainer& me) {
    me.barrier();
    me.barrier();
  });
}

TEST(TheExplorerFinds, AReductionThatDoesNotAwaitItsReaders) {
  expect_found({Wrong::kNotAwaited, &shm::RankSlot::finished}, "has a wrong sum", &reduce_twice);
}

TEST(TheExplorerFinds, AReaderThatDoesNotSayThatItHasRead) {
  expect_found({Wrong::kNeverSet, &shm::RankSlot::finished}, "nobody can go on", &reduce_twice);
}

TEST(TheExplorerFinds, ADeathThatARankDoesNotSee) {
  expect_found({.kind = Wrong::kDeathIgnored}, "nobody can go on", &train_once, {.may_fail = true, .mortal = 1});
}

TEST(TheExplorerFinds, ASleeperThatDoesNotAskToBeWoken) {
  expect_found({.kind = Wrong::kSleepsUnannounced}, "nobody can go on", &train_once, {.ranks = 2, .wake_ups = true});
}

} // namespace
} // namespace fsdp::testing
