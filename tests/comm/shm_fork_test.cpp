#include <csignal>
#include <cstdlib>

#include <sys/wait.h>
#include <unistd.h>

#include "comm/errands.h"
#include "comm/group_checks.h"
#include "comm/shm_backends.h"
#include "support/end_of_child.h"
#include "support/error_message.h"

/// Children that a rank forks.
namespace fsdp::testing {
namespace {

constexpr int64_t kNumel = 4096;

std::vector<Piece> pieces() {
  return {piece(kNumel, even_chunk(kNumel, 2), at::kFloat)};
}

template <typename Body>
::testing::AssertionResult ends_with_a_reason(const Body& body) {
  const auto [status, said] = end_of_child(body);
  if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGSEGV) {
    return ::testing::AssertionFailure() << "it ended with status " << status;
  }
  return mentions(said, "a forked child touched shards");
}

// A unit of two ranks, gathered. Its shards lie where the other rank reads them, and will change.
struct Sharded {
  GroupPointer group = join_processes(process_folder());
  std::shared_ptr<Home> home = group->make_home(pieces(), {}, kTest);
  std::unique_ptr<Gathered> gathered;

  Sharded() {
    std::signal(SIGSEGV, SIG_DFL); // whatever a sanitizer makes of it
    fill_slices(*group, *home, pieces(), 1);
    gathered = home->gather(kTest);
    gathered->wait();
  }
  float* shard() const {
    return static_cast<float*>(home->slice(0));
  }
  const volatile float* whole() const {
    return static_cast<const float*>(gathered->piece(0));
  }
};

TEST(ShmFork, AChildHasNoShards) {
  on_processes(2, [] {
    const Sharded unit;
    float* shard = unit.shard();
    const volatile float* whole = unit.whole();
    EXPECT_TRUE(ends_with_a_reason([&] { *shard = 77; }));
    EXPECT_TRUE(ends_with_a_reason([&] { _exit(*whole == 77 ? 2 : 3); }));
    unit.group->barrier(kTest);
    expect_pieces(*unit.gathered, pieces(), 1);
  });
}

TEST(ShmFork, AChildIsToldThatItIsNoRank) {
  on_processes(2, [] {
    Sharded unit;
    auto read = start_reduce(*unit.group, {.numels = {1000}});
    unit.group->barrier(kTest); // and nobody has waited for it
    auto pending = start_reduce(*unit.group, {.numels = {100'000}});
    const auto end = end_of_child([&] {
      EXPECT_TRUE(mentions(error_message([&] { unit.group->barrier(kTest); }), "a forked child"));
      EXPECT_TRUE(mentions(error_message([&] { unit.home->gather(kTest); }), "a forked child"));
      EXPECT_TRUE(mentions(error_message([&] { unit.home->begin_write(kTest); }), "a forked child"));
      EXPECT_TRUE(mentions(error_message([&] { unit.gathered->wait(); }), "a forked child"));
      EXPECT_TRUE(mentions(error_message([&] { pending.work->wait(); }), "a forked child"));
      EXPECT_TRUE(mentions(error_message([&] { read.work->wait(); }), "a forked child"));
      EXPECT_TRUE(pending.work->done()) << "a wait would throw, not block";
      unit.group->abort("no business of the parent");
    });
    EXPECT_EQ(end.status, 0) << end.said;
    pending.work->wait();
    pending.expect_equal();
    read.work->wait();
    unit.group->barrier(kTest);
  });
}

// Its next collective would wait for the first of these.
TEST(ShmFork, AChildIsToldSoBeforeItLooksAtWhatItsParentHasBegun) {
  on_processes(2, [] {
    const auto group = join_processes(process_folder());
    std::signal(SIGSEGV, SIG_DFL);
    for (int i = 0; i < 12; ++i) {
      start_reduce(*group, {.numels = {100'000}});
    }
    const auto end = end_of_child([&] {
      EXPECT_TRUE(mentions(error_message([&] { start_reduce(*group, {.numels = {1000}}); }), "a forked child"));
    });
    EXPECT_EQ(end.status, 0) << end.said;
    group->barrier(kTest);
  });
}

// With all that its parent had begun, and through the functions that run at exit.
TEST(ShmFork, AChildEnds) {
  static GroupPointer kept_until_exit;
  on_processes(2, [] {
    auto unit = std::make_unique<Sharded>();
    kept_until_exit = unit->group->split(0, kTest);
    auto pending = start_reduce(*unit->group, {.numels = {100'000}});
    const auto end = end_of_child([&] {
      unit.reset();
      pending = {};
      std::exit(0);
    });
    EXPECT_EQ(end.status, 0) << end.said;
    EXPECT_EQ(end_of_child([] { std::exit(0); }).status, 0);
    pending.work->wait();
    pending.expect_equal();
    kept_until_exit.reset();
  });
}

// Whose groups may be gone there.
TEST(ShmFork, AChildHasNoErrandsOfItsParent) {
  on_processes(1, [] {
    for (const bool is_thread : {true, false}) {
      const auto of_parent = Errands::of_rank(is_thread);
      EXPECT_EQ(Errands::of_rank(is_thread), of_parent);
      const auto end = end_of_child([&] { EXPECT_NE(Errands::of_rank(is_thread), of_parent); });
      EXPECT_EQ(end.status, 0) << is_thread;
    }
  });
}

// Of a process that is a rank already, as of any other.
TEST(ShmFork, AChildOfAChildIsAsFree) {
  on_processes(2, [] {
    const Sharded unit;
    EXPECT_EQ(end_of_child([&] { EXPECT_EQ(end_of_child([] {}).status, 0); }).status, 0);
    EXPECT_EQ(end_of_child([&] { EXPECT_TRUE(ends_with_a_reason([&] { *unit.shard() = 77; })); }).status, 0);
    unit.group->barrier(kTest);
  });
}

} // namespace
} // namespace fsdp::testing
