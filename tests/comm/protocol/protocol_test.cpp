#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/group.h>

#include "comm/protocol/explorer.h"

/// The shared-memory protocol in every order of the ranks' steps: no rank reads what is older than what the others have
/// published, or what is being written; none waits for ever; when one goes, all others end.
namespace fsdp::testing {
namespace {

constexpr int kMostRanks = 3;
constexpr int kUnits = 2;
constexpr int64_t kEach = 2; // elements of a unit that a rank keeps

using Readers = std::array<bool, kMostRanks>;
std::array<Readers, kUnits> readers; // who reads a unit in place just now

/// One rank of a model of two units, each a parameter whose elements all are its version: how often it was written.
class Trainer {
 public:
  explicit Trainer(c10::ScalarType gathered = c10::kFloat) : gathered_as_(gathered) {
    readers = {};
    group_ =
        shm_group(rank(), exploring::ranks(), &exploring::exchange, {.timeout = std::chrono::hours(1), .arena = false});
  }
  ~Trainer() {
    exploring::operation(std::uncaught_exceptions() > 0);
    for (int unit = 0; unit < kUnits; ++unit) {
      let_go(unit);
    }
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  Group& group() {
    return *group_;
  }
  static int rank() {
    return exploring::rank();
  }

  void make(int number) {
    Unit& unit = units_.at(static_cast<size_t>(number));
    unit.home = group_->make_home({{kEach * exploring::ranks(), kEach, c10::kFloat, gathered_as_}}, {}, label_);
    unit.home->begin_write(label_);
    fill(unit);
    unit.home->gather(label_)->wait();
  }
  void make_all() {
    make(0);
    make(1);
  }

  /// As a touch of a handle, which then points into the home until `release`.
  void gather(int number) {
    start_gather(number);
    finish_gather(number);
  }
  /// As a unit that is gathered ahead.
  void start_gather(int number) {
    begin_operation();
    let_go(number);
    Unit& unit = units_.at(static_cast<size_t>(number));
    unit.gathered = unit.home->gather(label_);
  }
  void finish_gather(int number) {
    Unit& unit = units_.at(static_cast<size_t>(number));
    unit.gathered->wait();
    reads(number) = gathered_as_ == c10::kFloat;
    read(number);
  }
  void gather_all() {
    gather(0);
    gather(1);
  }
  /// Reads for the last time, after whatever the others may have done.
  void release() {
    exploring::pause();
    for (int number = 0; number < kUnits; ++number) {
      if (units_.at(static_cast<size_t>(number)).gathered) {
        read(number);
      }
      let_go(number);
    }
  }

  /// As operators of an optimizer.
  void write(int number) {
    begin_operation();
    release();
    units_.at(static_cast<size_t>(number)).home->begin_write(label_);
    change(number);
  }
  void write_all() {
    write(0);
    write(1);
  }
  void step() {
    gather_all();
    write_all();
  }

  /// The other ranks' slices get no gradients: whatever nobody announces leaves them as they are.
  void only_gradients_of(int rank) {
    only_ = rank;
  }
  /// From here on shards may be written with no word to anybody.
  void end_backward() {
    begin_operation();
    release();
    ExpectedWrites expected{.certain = true, .changes = {}};
    if (gets_gradients(rank())) {
      expected.changes = {units_[0].home->slice(0)};
    }
    group_->begin_unseen_writes(expected, label_);
  }
  /// So they may from here on, until a gather.
  void show_new_shards() {
    begin_operation();
    release();
    group_->begin_unseen_writes({}, label_);
  }
  void write_unseen(int number) {
    begin_operation();
    exploring::pause();
    change(number, /*seen=*/false);
  }
  void write_all_unseen() {
    write_unseen(0);
    write_unseen(1);
  }

  /// In another group, of another library.
  void foreign_barrier() {
    begin_operation();
    exploring::exchange("");
  }
  void barrier() {
    begin_operation();
    const auto word = [this](int rank) { return std::to_string(barriers_) + "/" + std::to_string(rank); };
    ++barriers_;
    const auto all = group_->exchange(word(rank()), label_);
    for (int r = 0; r < exploring::ranks(); ++r) {
      if (all[static_cast<size_t>(r)] != word(r)) {
        exploring::violate("rank " + std::to_string(rank()) + " was told " + all[static_cast<size_t>(r)]);
      }
    }
  }

  /// Something of every rank's, in memory that is written and read once.
  void put_together() {
    begin_operation();
    const auto home = group_->make_home({{exploring::ranks(), 1, c10::kFloat, c10::kFloat}}, {}, label_);
    home->begin_write(label_);
    *static_cast<float*>(home->slice(0)) = static_cast<float>(rank());
    const auto gathered = home->gather(label_);
    gathered->wait();
    for (int r = 0; r < exploring::ranks(); ++r) {
      if (static_cast<const float*>(gathered->piece(0))[r] != static_cast<float>(r)) {
        exploring::violate(
            "rank " + std::to_string(rank()) + " put together what is not rank " + std::to_string(r) + "'s");
      }
    }
    group_->exchange("", label_);
  }

  /// Posts gradients; `wait_for` the sums.
  std::unique_ptr<Work> reduce(at::Tensor& gradients) {
    begin_operation();
    ++reductions_;
    gradients = at::full({kEach}, static_cast<double>(rank() + 1));
    return group_->all_reduce(gradients, ReduceOp::kSum, 1, label_);
  }
  void wait_for(Work& work, const at::Tensor& gradients) {
    begin_operation();
    work.wait();
    --reductions_;
    const auto sum = static_cast<float>(exploring::ranks() * (exploring::ranks() + 1)) / 2;
    if (gradients.const_data_ptr<float>()[0] != sum) {
      exploring::violate("rank " + std::to_string(rank()) + " has a wrong sum");
    }
  }

  /// This rank tells the others to end when it comes to that operation.
  void abort_at(int operation) {
    abort_at_ = operation;
  }

 private:
  struct Unit {
    std::shared_ptr<Home> home;
    std::unique_ptr<Gathered> gathered;
    float version = 1;
    float unseen = 0; // of these changes, were with no word
  };

  void begin_operation() {
    exploring::operation(reductions_ > 0);
    if (operations_++ == abort_at_) {
      group_->abort("it has had enough");
      throw CommError("had enough");
    }
  }
  bool& reads(int number) {
    return readers.at(static_cast<size_t>(number)).at(static_cast<size_t>(rank()));
  }
  void let_go(int number) {
    reads(number) = false;
    units_.at(static_cast<size_t>(number)).gathered.reset();
  }
  void read(int number) {
    const Unit& unit = units_.at(static_cast<size_t>(number));
    const void* memory = unit.gathered->piece(0);
    for (int64_t i = 0; i < kEach * exploring::ranks(); ++i) {
      const float value = gathered_as_ == c10::kFloat
                              ? static_cast<const float*>(memory)[i]
                              : static_cast<float>(static_cast<const c10::BFloat16*>(memory)[i]);
      const auto of = static_cast<int>(i / kEach);
      const float expected = version_of(unit, of);
      if (value != expected) {
        exploring::violate(
            "rank " + std::to_string(rank()) + " read version " + std::to_string(static_cast<int>(value)) +
            " of rank " + std::to_string(of) + "'s slice of unit " + std::to_string(number) + ", expected " +
            std::to_string(static_cast<int>(expected)));
      }
    }
  }
  bool gets_gradients(int of) const {
    return only_ < 0 || of == only_;
  }
  float version_of(const Unit& unit, int of) const {
    return unit.version - (gets_gradients(of) ? 0 : unit.unseen);
  }
  void fill(Unit& unit) const {
    std::fill_n(static_cast<float*>(unit.home->slice(0)), kEach, version_of(unit, rank()));
  }
  void change(int number, bool seen = true) {
    Unit& unit = units_.at(static_cast<size_t>(number));
    unit.version += 1;
    unit.unseen += seen ? 0 : 1;
    if (!seen && !gets_gradients(rank())) {
      return;
    }
    for (int r = 0; r < exploring::ranks(); ++r) {
      if (r != rank() && readers.at(static_cast<size_t>(number)).at(static_cast<size_t>(r))) {
        exploring::violate(
            "rank " + std::to_string(rank()) + " writes unit " + std::to_string(number) + " while rank " +
            std::to_string(r) + " reads it");
      }
    }
    fill(unit);
  }

  const Label label_{"test", "unit"};
  c10::ScalarType gathered_as_;
  std::shared_ptr<Group> group_;
  std::array<Unit, kUnits> units_;
  int barriers_ = 0;
  int reductions_ = 0; // on their way
  int operations_ = 0;
  int abort_at_ = -1;
  int only_ = -1; // rank that gets gradients; all if negative
};

using Program = std::function<void(Trainer&)>;

/// A model of two units, on which every rank runs `program`.
Explored explore_program(const Program& program, const ExplorerOptions& options = {}) {
  const Explored explored = explore(options, [&] {
    Trainer me;
    me.make_all();
    exploring::start();
    program(me);
  });
  return explored;
}

void expect_right(const Program& program, const ExplorerOptions& options = {}) {
  const Explored explored = explore_program(program, options);
  EXPECT_EQ(explored.violation, "");
  EXPECT_GT(explored.runs, 100); // that many orders at least
  EXPECT_EQ(explored.errors > 0, options.may_fail);
}

void expect_found(
    const Mistake& mistake, const std::string& what, const Program& program, ExplorerOptions options = {}) {
  options.mistake = mistake;
  const Explored explored = explore_program(program, options);
  EXPECT_NE(explored.violation.find(what), std::string::npos) << explored.violation;
}

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

// -- writes that no operator shows

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

void train_once(Trainer& me) {
  me.gather(0);
  me.write(0);
  me.gather(1);
  me.barrier();
}

TEST(Protocol, AllRanksEndWhereverOneDies) {
  expect_right(&train_once, {.may_fail = true, .mortal = 1});
}

TEST(Protocol, AllRanksEndWhereverOneDiesAmongUnseenWrites) {
  expect_right(&train_unseen, {.may_fail = true, .mortal = 1});
}

TEST(Protocol, AllRanksEndWhereverOneDiesWithOrWithoutGradients) {
  for (const int mortal : {0, 1}) {
    expect_right(&train_one_slice, {.may_fail = true, .mortal = mortal});
  }
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

TEST(TheExplorerFinds, ADeathThatARankDoesNotSee) {
  expect_found({.kind = Wrong::kDeathIgnored}, "nobody can go on", &train_once, {.may_fail = true, .mortal = 1});
}

TEST(TheExplorerFinds, ASleeperThatDoesNotAskToBeWoken) {
  expect_found({.kind = Wrong::kSleepsUnannounced}, "nobody can go on", &train_once, {.ranks = 2, .wake_ups = true});
}

} // namespace
} // namespace fsdp::testing
