#include <gtest/gtest.h>

#include "comm/protocol/trainer.h"

/// As protocol_test.cpp: where shards are written with no word to anybody.
namespace fsdp::testing {
namespace {

void train_unseen(Trainer& me) {
  me.gather(0);
  me.end_backward();
  me.write_all_unseen();
  me.gather_all();
}

TEST(Protocol, UnseenWritesAreReadByAllInTheNextStep) {
  expect_right(&train_unseen);
}

TEST(Protocol, UnseenWritesStepAfterStep) {
  expect_right([](Trainer& me) {
    for (int i = 0; i < 2; ++i) {
      me.gather(0);
      me.end_backward();
      me.write_unseen(0);
    }
    me.gather(0);
  });
}

TEST(Protocol, UnseenFirstValuesAreReadByAll) {
  expect_right([](Trainer& me) {
    me.show_new_shards();
    me.write_all_unseen();
    me.gather_all();
    me.end_backward();
    me.write_unseen(0);
    me.gather(0);
  });
}

TEST(Protocol, NewShardsThatKeepTheirValues) {
  expect_right([](Trainer& me) {
    me.show_new_shards();
    if (me.rank() == 0) {
      me.gather(1);
    }
    me.gather(0);
    me.write(0);
    me.gather_all();
  });
}

TEST(Protocol, EvaluationAfterUnseenWrites) {
  expect_right([](Trainer& me) {
    me.end_backward();
    me.write_all_unseen();
    me.gather_all();
    me.release();
    me.gather(1);
    me.end_backward();
    me.write_unseen(1);
    me.gather(1);
  });
}

TEST(Protocol, AnOptimizerWhoseWritesAreSeen) {
  expect_right([](Trainer& me) {
    me.gather(0);
    me.end_backward();
    me.write_all();
    me.gather_all();
    me.end_backward();
    me.write(0);
    me.gather(0);
  });
}

TEST(Protocol, ARankReadsAloneAfterUnseenWrites) {
  expect_right([](Trainer& me) {
    me.end_backward();
    me.write_all_unseen();
    if (me.rank() == 0) {
      me.gather(1);
    }
    me.gather_all();
  });
}

TEST(Protocol, ARankReadsAloneBeforeUnseenWrites) {
  expect_right([](Trainer& me) {
    me.end_backward();
    if (me.rank() == 0) {
      me.gather(1);
      me.release();
    }
    me.barrier();
    me.write_all_unseen();
    me.gather_all();
  });
}

TEST(Protocol, ABarrierAmongUnseenWrites) {
  expect_right([](Trainer& me) {
    me.end_backward();
    me.write_unseen(0);
    me.barrier();
    me.write_unseen(1);
    me.gather_all();
  });
}

TEST(Protocol, SomethingIsPutTogetherAmongUnseenWrites) {
  for (const bool has_begun : {false, true}) {
    expect_right(
        [has_begun](Trainer& me) {
          me.end_backward();
          if (has_begun) {
            me.write_unseen(0);
          }
          me.put_together();
          me.write_all_unseen();
          me.gather_all();
        },
        {.ranks = 2});
  }
}

// -- where only one rank's slices get gradients

void train_one_slice(Trainer& me) {
  me.only_gradients_of(1);
  train_unseen(me);
}

TEST(Protocol, RanksWithoutGradientsReadWhatAnotherHasWritten) {
  expect_right(&train_one_slice);
}

TEST(Protocol, RanksWithoutGradientsStepAfterStep) {
  expect_right([](Trainer& me) {
    me.only_gradients_of(1);
    for (int i = 0; i < 2; ++i) {
      me.gather(0);
      me.end_backward();
      me.write_unseen(0);
    }
    me.gather(0);
  });
}

TEST(Protocol, RanksWithoutGradientsEvaluateBeforeTheStep) {
  expect_right([](Trainer& me) {
    me.only_gradients_of(1);
    me.end_backward();
    me.gather_all();
    me.release();
    me.foreign_barrier();
    me.write_all_unseen();
    me.gather_all();
  });
}

TEST(Protocol, ARankWithoutGradientsReadsAlone) {
  expect_right([](Trainer& me) {
    me.only_gradients_of(1);
    me.end_backward();
    me.write_all_unseen();
    if (me.rank() == 0) {
      me.gather(1);
    }
    me.gather_all();
    me.end_backward();
    me.write_unseen(1);
    me.gather(1);
  });
}

TEST(Protocol, RanksWithoutGradientsAndAnOptimizerWhoseWritesAreSeen) {
  expect_right([](Trainer& me) {
    me.only_gradients_of(1);
    me.end_backward();
    me.gather(1);
    me.write_all();
    me.gather_all();
  });
}

TEST(Protocol, RanksWithoutGradientsMeetWhileTheyGatherAhead) {
  expect_right(
      [](Trainer& me) {
        me.only_gradients_of(1);
        me.end_backward();
        me.start_gather(0);
        me.barrier();
        me.finish_gather(0);
        me.release();
        me.foreign_barrier();
        me.write_all_unseen();
        me.gather_all();
      },
      {.ranks = 2});
}

TEST(Protocol, RanksWithoutGradientsMakeAHome) {
  expect_right(
      [](Trainer& me) {
        me.only_gradients_of(1);
        me.end_backward();
        me.put_together();
        me.foreign_barrier();
        me.write_unseen(0);
        me.gather_all();
      },
      {.ranks = 2});
}

TEST(Protocol, ABackwardWithoutAStepWhereRanksGetNoGradients) {
  expect_right([](Trainer& me) {
    me.only_gradients_of(1);
    for (int i = 0; i < 2; ++i) {
      me.end_backward();
      me.gather(0);
      me.release();
      me.foreign_barrier();
    }
  });
}

constexpr int kNobody = kMostRanks;

TEST(Protocol, ARankReadsAloneWhereNobodyGetsGradients) {
  expect_right([](Trainer& me) {
    me.only_gradients_of(kNobody);
    me.end_backward();
    if (me.rank() == 0) {
      me.gather(0);
      me.release();
    }
    me.foreign_barrier();
    me.write(0);
    me.gather_all();
  });
}

TEST(Protocol, ARankThatDoesNotKnowOfABackward) {
  expect_right([](Trainer& me) {
    me.only_gradients_of(kNobody);
    me.rank() == 1 ? me.show_new_shards() : me.end_backward();
    me.gather(0);
    me.release();
    me.foreign_barrier();
    me.write(1);
    me.gather_all();
  });
}

// -- ranks that go

TEST(Protocol, AllRanksEndWhereverOneDiesAmongUnseenWrites) {
  expect_right(&train_unseen, {.may_fail = true, .mortal = 1});
}

TEST(Protocol, AllRanksEndWhereverOneDiesWithOrWithoutGradients) {
  for (const int mortal : {0, 1}) {
    expect_right(&train_one_slice, {.may_fail = true, .mortal = mortal});
  }
}

// -- mistakes

using Wrong = Mistake::Kind;

TEST(TheExplorerFinds, UnseenWritesThatDoNotAwaitTheReaders) {
  expect_found(
      {Wrong::kNotAwaited, &shm::RankSlot::opened},
      "read version 2 of rank 1's slice of unit 0, expected 1",
      &train_unseen);
}

TEST(TheExplorerFinds, AReaderThatDoesNotAwaitUnseenWrites) {
  expect_found({Wrong::kNotAwaited, &shm::RankSlot::closed}, "rank 1 read version 1 of rank", &train_unseen);
}

TEST(TheExplorerFinds, ARankWithoutGradientsThatDoesNotGoByTheOthers) {
  expect_found(
      {.kind = Wrong::kNotAwaited, .counter = &shm::RankSlot::looked, .rank = 0},
      "rank 0 read version 1 of rank 1's slice of unit 0, expected 2",
      &train_one_slice);
}

TEST(TheExplorerFinds, ALookThatIsNotTold) {
  expect_found({Wrong::kNeverSet, &shm::RankSlot::looked}, "nobody can go on", [](Trainer& me) {
    me.only_gradients_of(1);
    me.end_backward();
    me.gather(0);
    me.release();
    me.foreign_barrier();
  });
}

} // namespace
} // namespace fsdp::testing
