#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include <fsdp/mesh.h>

#include "comm/c10d/factory.h"
#include "comm/foreign_backends.h"
#include "support/error_message.h"

/// Process groups that libfsdp did not make.
namespace fsdp::testing {
namespace {

void gather_and_reduce(const GroupPointer& group) {
  for (const auto& pieces : {all_sorts(group->size()), with_casts(group->size())}) {
    const auto home = group->make_home(pieces, {}, kTest);
    fill_slices(*group, *home, pieces, 3);
    const auto gathered = home->gather(kTest);
    gathered->wait();
    expect_pieces(*gathered, pieces, 3);
  }
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kComplexFloat}) {
    auto reduced = start_reduce(*group, {.numels = {1000, 3, 64}, .dtype = dtype, .divide_by = 2, .simple = true});
    reduced.work->wait();
    reduced.expect_equal();
  }
  EXPECT_EQ(group->exchange("x", kTest).size(), static_cast<size_t>(group->size()));
  at::Tensor tensor = at::full({3}, static_cast<float>(group->rank()));
  group->broadcast(tensor, 1, kTest);
  EXPECT_TRUE(tensor.eq(1).all().item<bool>());
  group->barrier(kTest);
}

TEST(C10dForeign, AGlooGroupMadeElsewhereWorks) {
  run_foreign(
      3,
      [](const GroupPointer& group) {
        EXPECT_EQ(group->name(), "gloo");
        gather_and_reduce(group);
      },
      &as_it_is);
}

TEST(C10dForeign, ABackendOfFewCollectivesWorks) {
  run_foreign(
      3, [](const GroupPointer& group) { gather_and_reduce(group); }, &sparse);
}

TEST(C10dForeign, BuffersComeFromTheBackendWhereThatIsWanted) {
  run_foreign(
      2,
      [](const GroupPointer& group) {
        gather_and_reduce(group);
        EXPECT_EQ(Sparse::allocated, 0);
        set_backend_memory(*group, true);
        gather_and_reduce(group);
        EXPECT_GT(Sparse::allocated, 0);
        set_backend_memory(*group, false);
        const int before = Sparse::allocated;
        gather_and_reduce(group);
        EXPECT_EQ(Sparse::allocated, before);
      },
      &sparse);
}

TEST(C10dForeign, RowsThatWouldBeMostlyPaddingAreNotSent) {
  run_foreign(
      3,
      [](const GroupPointer& group) {
        const auto all_reduced = [&](std::vector<int64_t> numels) {
          Sparse::all_reduced = 0;
          auto reduced = start_reduce(*group, {.numels = std::move(numels), .divide_by = 2, .simple = true});
          reduced.work->wait();
          reduced.expect_equal();
          return Sparse::all_reduced;
        };
        EXPECT_EQ(all_reduced(std::vector<int64_t>(6000, 1)), 6000);
        EXPECT_EQ(all_reduced(std::vector<int64_t>(6000, 2)), 0) << "a third of it is padding";
        EXPECT_EQ(all_reduced({1}), 0) << "too little to matter";
        group->barrier(kTest);
      },
      &sparse);
}

TEST(C10dForeign, BackendsWithoutMemoryOfTheirOwnUseLibTorchs) {
  run_foreign(
      2,
      [](const GroupPointer& group) {
        set_backend_memory(*group, true);
        gather_and_reduce(group);
      },
      &as_it_is);
}

TEST(C10dForeign, AGroupThatCanSplitIsSplit) {
  run_foreign(
      4,
      [](const GroupPointer& group) {
        const auto part = group->split(group->rank() % 2, kTest);
        EXPECT_EQ(part->size(), 2);
        EXPECT_EQ(part->rank(), group->rank() / 2);
        const auto all = part->exchange(std::to_string(group->rank()), kTest);
        const int first = group->rank() % 2;
        EXPECT_EQ(all, (std::vector{std::to_string(first), std::to_string(first + 2)}));
        const auto alone = group->split(group->rank(), kTest);
        EXPECT_EQ(alone->size(), 1);
        group->barrier(kTest);
      },
      &as_it_is);
}

TEST(C10dForeign, AnEnvironmentThatOneRankCannotReadIsAnErrorOnAllRanks) {
  for (const char* name : {"FSDP_SHM", "FSDP_TIMEOUT", "FSDP_ARENA"}) {
    on_processes(2, [&] {
      const Launch launch = read_launch();
      Rendezvous rendezvous(launch, std::chrono::seconds(60));
      const auto process_group = make_process_group(rendezvous, launch, &as_it_is);
      if (launch.rank == 1) {
        setenv(name, "maybe", /*overwrite=*/1);
      }
      const auto join = [&] { Group::nearest(process_group, c10::kCPU); };
      const auto message = launch.rank == 1 ? error_message(join) : error_message<CommError>(join);
      EXPECT_TRUE(contains(message, std::string(name) + " should be")) << launch.rank;
      EXPECT_TRUE(contains(message, "but is \"maybe\"")) << launch.rank;
      rendezvous.leave(std::chrono::seconds(20));
    });
  }
}

/// Throws what backends throw, and not when it is waited for but at once.
class ThrowsAtOnce final : public Gloo {
 public:
  using Gloo::Gloo;
  C10dWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    if (getRank() == 1) {
      C10_THROW_ERROR(DistBackendError, "the card is gone"); // what lacks an operation throws other things
    }
    return Gloo::_allgather_base(output, input, options);
  }
};

TEST(C10dForeign, WhatTheOrderCheckThrowsIsAnErrorOfTheGroupsOnAllRanks) {
  on_processes(3, [] {
    setenv("FSDP_CHECK_ORDER", "1", /*overwrite=*/1);
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const auto make = [](const StorePointer& store, const Launch& own) -> c10::intrusive_ptr<c10d::Backend> {
      return make_gloo<ThrowsAtOnce>(store, own);
    };
    const auto group = Group::from(make_process_group(rendezvous, launch, make));
    const auto message = error_message<CommError>([&] { group->barrier(kTest); });
    EXPECT_TRUE(contains(message, "[test] rank " + std::to_string(launch.rank) + " of 3"));
    EXPECT_TRUE(contains(message, "the card is gone")) << launch.rank;
    EXPECT_THROW(group->barrier(kTest), CommError);
    rendezvous.leave(std::chrono::seconds(20));
  });
}

/// Finds failures while nobody waits, as NCCL's watchdog does.
class HasAWatchdog final : public Gloo {
 public:
  using Gloo::Gloo;
  c10d::ErrorType getError() override {
    return found;
  }
  inline static auto found = c10d::ErrorType::SUCCESS;
};

TEST(C10dForeign, WhatTheWatchdogFoundIsAnErrorAtTheNextCollective) {
  on_processes(3, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const auto make = [](const StorePointer& store, const Launch& own) -> c10::intrusive_ptr<c10d::Backend> {
      return make_gloo<HasAWatchdog>(store, own);
    };
    const auto group = Group::from(make_process_group(rendezvous, launch, make));
    group->barrier(kTest);
    if (launch.rank == 1) {
      HasAWatchdog::found = c10d::ErrorType::TIMEOUT;
    }
    const auto message = error_message<CommError>([&] { group->barrier(kTest); });
    EXPECT_TRUE(contains(message, "an earlier collective failed")) << launch.rank; // the others heard
    EXPECT_THROW(group->barrier(kTest), CommError);
    rendezvous.leave(std::chrono::seconds(20));
  });
}

/// Its watchdog breaks off what runs on the device, which ends the host's wait for it.
class BreaksOff final : public Gloo {
 public:
  using Gloo::Gloo;
  c10d::ErrorType getError() override {
    return found;
  }
  C10dWork barrier(const c10d::BarrierOptions& options) override {
    return broken_off(Gloo::barrier(options));
  }
  C10dWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return broken_off(Gloo::_allgather_base(output, input, options));
  }
  inline static int in_turns = 0; ///< at the how many-th collective from now

 private:
  class Broken final : public c10d::Work {
   public:
    explicit Broken(C10dWork work) : work_(std::move(work)) {}
    bool isCompleted() override {
      return work_->isCompleted();
    }
    bool wait(std::chrono::milliseconds timeout) override {
      work_->wait(timeout);
      found = c10d::ErrorType::TIMEOUT;
      return true;
    }

   private:
    C10dWork work_;
  };
  static C10dWork broken_off(C10dWork work) {
    return --in_turns == 0 ? C10dWork(c10::make_intrusive<Broken>(std::move(work))) : work;
  }
  inline static auto found = c10d::ErrorType::SUCCESS;
};

// Not at the next one: the program goes on at once.
TEST(C10dForeign, WhatIsBrokenOffWhileTheHostWaitsForItIsAnError) {
  const auto barrier = [](Group& group) { group.barrier(kTest); };
  const auto exchange = [](Group& group) { group.exchange("text", kTest); };
  for (const auto& [collective, turns] :
       {std::pair<std::function<void(Group&)>, int>(barrier, 1), {exchange, 1}, {exchange, 2}}) {
    run_foreign(
        2,
        [&](const GroupPointer& group) {
          collective(*group);
          BreaksOff::in_turns = turns;
          const auto message = error_message<CommError>([&] { collective(*group); });
          EXPECT_TRUE(contains(message, "it or an earlier collective failed"));
        },
        [](const StorePointer& store, const Launch& launch) -> c10::intrusive_ptr<c10d::Backend> {
          setenv("FSDP_CHECK_ORDER", "0", /*overwrite=*/1); // which are collectives too
          return make_gloo<BreaksOff>(store, launch);
        });
  }
}

/// As Gloo's own split now and then: it never comes back.
class HangsInSplit final : public Gloo {
 public:
  using Gloo::Gloo;
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>&,
      const std::vector<int>&,
      const c10::intrusive_ptr<Backend::Options>&) override {
    for (;;) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
    }
  }
};

// The ranks reach each split at different moments, and some groups overlap earlier ones.
TEST(C10dForeign, GlooIsSplitWithoutItsOwnSplit) {
  run_foreign(
      3,
      [](const GroupPointer& group) {
        for (int round = 0; round < 6; ++round) {
          std::this_thread::sleep_for(std::chrono::milliseconds(10 * ((group->rank() + round) % 3)));
          const int color = round % 2 == 0 ? 0 : group->rank() / 2;
          const auto part = group->split(color, kTest);
          EXPECT_EQ(part->size(), round % 2 == 0 ? 3 : (color == 0 ? 2 : 1));
          if (part->size() > 1) {
            gather_and_reduce(part);
          }
        }
      },
      [](const StorePointer& store, const Launch& launch) -> c10::intrusive_ptr<c10d::Backend> {
        return make_gloo<HangsInSplit>(store, launch);
      });
}

/// Its network is gone.
class FailsInSplit final : public Gloo {
 public:
  using Gloo::Gloo;
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>&,
      const std::vector<int>&,
      const c10::intrusive_ptr<Backend::Options>&) override {
    throw std::runtime_error("the cable is out");
  }
};

/// What a rank is told when its process group does not come to the end of splitting itself.
std::string message_of_split(Rendezvous& rendezvous, const Launch& launch, bool one_fails, std::chrono::seconds limit) {
  const auto make = [&](const StorePointer& store, const Launch& own) -> c10::intrusive_ptr<c10d::Backend> {
    return one_fails && own.rank == 1 ? make_gloo<FailsInSplit>(store, own) : make_gloo<HangsInSplit>(store, own);
  };
  const auto group = c10d_group(make_process_group(rendezvous, launch, make), {.timeout = limit});
  const auto message = error_message<CommError>([&] { group->split(/*color=*/0, kTest); });
  EXPECT_THROW(group->barrier(kTest), CommError);
  rendezvous.leave(std::chrono::seconds(20));
  return message;
}

TEST(C10dForeign, ASplitOfTheBackendsOwnThatNeverEndsIsGivenUp) {
  on_processes(2, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const auto message = message_of_split(rendezvous, launch, /*one_fails=*/false, std::chrono::seconds(12));
    EXPECT_TRUE(
        contains(message, "[test] rank " + std::to_string(launch.rank) + " of 2 could not make the gloo group"));
  });
}

TEST(C10dForeign, ASplitOfTheBackendsOwnThatFailsOnOneRankEndsTheOthers) {
  on_processes(2, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const auto message = message_of_split(rendezvous, launch, /*one_fails=*/true, std::chrono::seconds(600));
    EXPECT_TRUE(contains(message, "the cable is out")) << message;
  });
}

/// As NCCL's: all ranks of the parent take part, each with its own part.
class SplitsTogether final : public Gloo {
 public:
  using Gloo::Gloo;
  const std::string getBackendName() const override {
    return "together";
  }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<Backend::Options>& options) override {
    Gloo::barrier({})->wait(std::chrono::seconds(20));
    return Gloo::split(store, ranks, options);
  }
};

TEST(C10dForeign, ARankThatIsAloneTakesPartInTheSplitOfTheBackends) {
  run_foreign(
      3,
      [](const GroupPointer& group) {
        const auto part = group->split(group->rank() == 1 ? 1 : 0, kTest);
        EXPECT_EQ(part->size(), group->rank() == 1 ? 1 : 2);
        EXPECT_EQ(part->exchange("x", kTest).size(), static_cast<size_t>(part->size()));
        EXPECT_EQ(group->split(group->rank(), kTest)->size(), 1);
        group->barrier(kTest);
      },
      [](const StorePointer& store, const Launch& launch) -> c10::intrusive_ptr<c10d::Backend> {
        return make_gloo<SplitsTogether>(store, launch);
      });
}

/// Whose work throws what it failed of, whatever it is asked.
class ThrowsWhenAsked final : public Gloo {
 public:
  using Gloo::Gloo;
  C10dWork barrier(const c10d::BarrierOptions& options) override {
    return getRank() == 1 ? C10dWork(c10::make_intrusive<Broken>()) : Gloo::barrier(options);
  }

 private:
  class Broken final : public c10d::Work {
   public:
    bool isCompleted() override {
      throw std::runtime_error("the card is gone");
    }
    bool wait(std::chrono::milliseconds) override {
      throw std::runtime_error("the card is gone");
    }
  };
};

TEST(C10dForeign, AWorkThatThrowsWhenItIsAskedIsAnErrorOnAllRanks) {
  run_foreign(
      2,
      [](const GroupPointer& group) {
        const auto message = error_message<CommError>([&] { group->barrier(kTest); });
        EXPECT_TRUE(contains(message, "the card is gone")) << message;
      },
      [](const StorePointer& store, const Launch& launch) -> c10::intrusive_ptr<c10d::Backend> {
        setenv("FSDP_CHECK_ORDER", "0", /*overwrite=*/1); // which are collectives too
        return make_gloo<ThrowsWhenAsked>(store, launch);
      });
}

// Models come and go, and each makes a `Group` of the same process group.
TEST(C10dForeign, EachGroupOfAProcessGroupSplitsAnew) {
  on_processes(4, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const auto process_group = make_process_group(rendezvous, launch, &as_it_is);
    for (int round = 0; round < 6; ++round) {
      const auto group = Group::from(process_group);
      gather_and_reduce(group->split(/*color=*/0, kTest));
    }
    rendezvous.leave(std::chrono::seconds(20));
  });
}

TEST(C10dForeign, AGroupThatCannotSplitSaysWhatToDo) {
  run_foreign(
      2,
      [](const GroupPointer& group) {
        EXPECT_TRUE(contains(error_message([&] { group->split(0, kTest); }), "Mesh::from_groups"));
        group->barrier(kTest);
      },
      &sparse);
}

TEST(C10dForeign, AMeshOfIt) {
  on_processes(2, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const Mesh mesh = Mesh::from_group(make_process_group(rendezvous, launch, &as_it_is), "shard");
    EXPECT_EQ(mesh.str(), "Mesh(2, shard, cpu)");
    mesh.group()->barrier(kTest);
    rendezvous.leave(std::chrono::seconds(20));
  });
}

TEST(C10dForeign, OtherDevicesThanTheGroupsAreErrors) {
  run_foreign(
      2,
      [](const GroupPointer& group) {
        const HomeOptions on_cuda{.device = c10::Device(c10::kCUDA, 0), .offload = false, .pin_memory = false};
        const std::string message = error_message([&] { group->make_home({piece(4, 2, at::kFloat)}, on_cuda, kTest); });
        EXPECT_TRUE(contains(message, "serves cuda:0"));
        EXPECT_TRUE(contains(message, "serves cpu"));
        group->barrier(kTest);
      },
      &as_it_is);
}

// The gather reads the very memory that is written next: what it shows is from before.
TEST(C10dForeign, WritesWaitForAGatherOnItsWay) {
  run_foreign(
      2,
      [](const GroupPointer& group) {
        const int64_t numel = 8 << 20;
        const auto home = group->make_home({piece(numel, numel / 2, at::kFloat)}, {}, kTest);
        const at::Tensor mine = view_of(home->slice(0), numel / 2, at::kFloat);
        for (float generation = 1; generation < 6; ++generation) {
          home->begin_write(kTest);
          mine.fill_(generation);
          const auto gathered = home->gather(kTest);
          home->begin_write(kTest);
          mine.fill_(-1);
          gathered->wait();
          EXPECT_TRUE(view_of(gathered->piece(0), numel, at::kFloat).eq(generation).all().item<bool>());
          EXPECT_EQ(gathered->bytes(), numel * 4);
        }
        group->barrier(kTest);
      },
      &as_it_is);
}

TEST(C10dForeign, OffloadIsNothingSpecialOnTheCpu) {
  run_foreign(
      2,
      [](const GroupPointer& group) {
        const auto pieces = all_sorts(group->size());
        const auto home = group->make_home(pieces, {.device = c10::kCPU, .offload = true, .pin_memory = true}, kTest);
        fill_slices(*group, *home, pieces, 3);
        const auto gathered = home->gather(kTest);
        gathered->wait();
        expect_pieces(*gathered, pieces, 3);
        group->barrier(kTest);
      },
      &as_it_is);
}

TEST(C10dForeign, TheEnvironmentTurnsTheOrderCheckOn) {
  on_processes(2, [] {
    setenv("FSDP_CHECK_ORDER", "1", /*overwrite=*/1);
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const auto group = Group::from(make_process_group(rendezvous, launch, &as_it_is));
    group->barrier(kTest);
    const Label mine{"unshard", launch.rank == 0 ? "blocks.1" : "blocks.7"};
    const std::string message = comm_error([&] { group->barrier(mine); });
    EXPECT_TRUE(mentions(message, "unshard of 'blocks.1'"));
    EXPECT_TRUE(mentions(message, "unshard of 'blocks.7'"));
    rendezvous.leave(std::chrono::seconds(20));
  });
}

TEST(C10dForeign, TheOrderOfTheFirst512CollectivesIsCompared) {
  for (const int alike : {511, 512}) {
    on_processes(2, [&] {
      const Launch launch = read_launch();
      Rendezvous rendezvous(launch, std::chrono::seconds(60));
      const auto group = Group::from(make_process_group(rendezvous, launch, &as_it_is));
      for (int i = 0; i < alike; ++i) {
        group->barrier(kTest);
      }
      const auto differ = [&] { group->barrier({"unshard", launch.rank == 0 ? "blocks.1" : "blocks.7"}); };
      if (alike < 512) {
        EXPECT_TRUE(mentions(comm_error(differ), "unshard of 'blocks.7'"));
      } else {
        EXPECT_NO_THROW(differ());
      }
      rendezvous.leave(std::chrono::seconds(20));
    });
  }
}

TEST(C10dForeign, RanksOfWhichSomeCheckTheOrderAreTold) {
  on_processes(2, [] {
    const Launch launch = read_launch();
    if (launch.rank == 1) {
      setenv("FSDP_CHECK_ORDER", "1", /*overwrite=*/1);
    }
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const auto group = Group::from(make_process_group(rendezvous, launch, &as_it_is));
    const std::string message = comm_error([&] { group->barrier(kTest); });
    EXPECT_TRUE(mentions(message, "must have the same FSDP_CHECK_ORDER")) << message;
    rendezvous.leave(std::chrono::seconds(20));
  });
}

TEST(C10dForeign, TheFirstCollectivesAreCheckedWithoutBeingAsked) {
  on_processes(2, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const auto group = Group::from(make_process_group(rendezvous, launch, &as_it_is));
    const std::string message = comm_error([&] { group->barrier({"unshard", launch.rank == 0 ? "a" : "b"}); });
    EXPECT_TRUE(mentions(message, "unshard of 'a'"));
    EXPECT_TRUE(mentions(message, "unshard of 'b'"));
    rendezvous.leave(std::chrono::seconds(20));
  });
}

TEST(C10dForeign, NullIsAnError) {
  EXPECT_TRUE(contains(error_message([] { Group::from(c10::intrusive_ptr<c10d::ProcessGroup>()); }), "got null"));
}

TEST(C10dForeign, BigSlicesArriveWhereTheyBelong) {
  run_foreign(
      2,
      [](const GroupPointer& group) {
        const int64_t numel = 1'000'001, chunk = 500'001;
        const std::vector<Piece> pieces{
            piece(numel, chunk, at::kFloat), piece(7, 4, at::kDouble), piece(numel, chunk, at::kFloat)};
        const auto home = group->make_home(pieces, {}, kTest);
        fill_slices(*group, *home, pieces, 1);
        const auto gathered = home->gather(kTest);
        EXPECT_LT(gathered->bytes(), 3 * numel * 4) << "in memory twice"; // looked at before the wait
        gathered->wait();
        expect_pieces(*gathered, pieces, 1);
        group->barrier(kTest);
      },
      &as_it_is);
}

} // namespace
} // namespace fsdp::testing
