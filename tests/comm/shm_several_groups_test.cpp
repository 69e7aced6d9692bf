#include <thread>

#include "comm/gloo_group.h"
#include "comm/group_checks.h"
#include "comm/shm_backends.h"

/// Ranks that are in several groups at once.
namespace fsdp::testing {
namespace {

constexpr auto kTimeout = std::chrono::seconds(60);

// Rank 0 has its part of x still to do when it waits in y, where rank 1 comes only when x is done.
void cross(Group& x, Group& y) {
  const at::Tensor sum = at::ones({100'000});
  const auto work = x.all_reduce(sum, ReduceOp::kSum, 1, kTest);
  const auto reduced = start_reduce(x, {.numels = {100'000}, .simple = true});
  if (x.rank() == 0) {
    y.barrier(kTest);
  }
  work->wait();
  reduced.work->wait(); // until rank 0 has read it, too
  reduced.expect_equal();
  if (x.rank() != 0) {
    y.barrier(kTest);
  }
  EXPECT_TRUE(sum.eq(static_cast<float>(x.size())).all().item<bool>());
}

void cross_with_part(const GroupPointer& group) {
  const auto part = group->split(0, kTest);
  for (int i = 0; i < 20; ++i) {
    cross(*group, *part);
    cross(*part, *group);
  }
}

TEST(ShmSeveralGroups, ThreadsDoTheirPartsInAllGroupsWhileTheyWaitInOne) {
  run_threads(3, kTimeout, &cross_with_part);
}

TEST(ShmSeveralGroups, ProcessesDoTheirPartsInAllGroupsWhileTheyWaitInOne) {
  on_processes(3, [] { cross_with_part(join_processes(process_folder(), kTimeout)); });
}

// As meshes of another library's process groups are.
TEST(ShmSeveralGroups, GroupsThatWereMadeOneByOneToo) {
  on_processes(2, [] {
    const auto x = join_processes(process_folder(), kTimeout);
    const auto folder = process_folder() / "y";
    std::filesystem::create_directories(folder);
    const auto y = join_processes(folder, kTimeout);
    for (int i = 0; i < 20; ++i) {
      cross(*x, *y);
      cross(*y, *x);
    }
  });
}

// As over hosts, within which ranks share memory.
TEST(ShmSeveralGroups, ProcessesDoTheirPartsWhileTheyWaitInAGroupOfAnotherKind) {
  if (!gloo_available()) {
    GTEST_SKIP() << "built without Gloo";
  }
  on_processes(2, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, kTimeout);
    const auto shared = join_processes(process_folder(), kTimeout);
    const auto gloo = gloo_group(rendezvous, launch, kTimeout);
    for (int i = 0; i < 20; ++i) {
      cross(*shared, *gloo);
      cross(*gloo, *shared);
    }
    rendezvous.leave(kTimeout);
  });
}

// Rank 1 comes to y once x is done, for which rank 0 has to do its part.
void ask_across(Group& x, Group& y) {
  const auto in_x = x.all_reduce(at::ones({100'000}), ReduceOp::kSum, 1, kTest);
  if (x.rank() != 0) {
    in_x->wait();
  }
  const auto in_y = y.all_reduce(at::ones({100'000}), ReduceOp::kSum, 1, kTest);
  const auto end = std::chrono::steady_clock::now() + kTimeout;
  while (!in_y->done() && std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(in_y->done());
  in_y->wait();
  in_x->wait();
}

TEST(ShmSeveralGroups, ProcessesDoTheirPartsInAllGroupsWhileTheyAskInOne) {
  on_processes(2, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, kTimeout);
    const auto x = join_processes(process_folder(), kTimeout);
    const auto folder = process_folder() / "y";
    std::filesystem::create_directories(folder);
    std::vector<GroupPointer> others{join_processes(folder, kTimeout)};
    if (gloo_available()) {
      others.push_back(gloo_group(rendezvous, launch, kTimeout));
    }
    for (const auto& y : others) {
      for (int i = 0; i < 20; ++i) {
        ask_across(*x, *y);
        ask_across(*y, *x);
      }
    }
    rendezvous.leave(kTimeout);
  });
}

// One group fails while its part is done from a wait in the other: that is told where the failed one is used.
TEST(ShmSeveralGroups, AFailureInOneIsToldThere) {
  on_processes(2, [] {
    const auto x = join_processes(process_folder(), kTimeout);
    const auto folder = process_folder() / "y";
    std::filesystem::create_directories(folder);
    const auto y = join_processes(folder, kTimeout);
    const auto work = x->all_reduce(at::ones({100'000 + x->rank()}), ReduceOp::kSum, 1, kTest);
    y->barrier(kTest);
    EXPECT_TRUE(mentions(comm_error([&] { work->wait(); }), "with different sizes"));
    y->barrier(kTest);
  });
}

} // namespace
} // namespace fsdp::testing
