#include <filesystem>
#include <fstream>
#include <sstream>

#include <sys/wait.h>
#include <unistd.h>

#include "comm/group_checks.h"
#include "comm/shm_backends.h"
#include "support/error_message.h"
#include "support/memory.h"

namespace fsdp::testing {
namespace {

// Of all ranks. Nobody goes on before all have looked.
double sum_of_ranks(Group& group, double mine) {
  at::Tensor sum = at::full({1}, mine, at::kDouble);
  group.all_reduce(sum, ReduceOp::kSum, 1, kTest)->wait();
  return sum.item<double>();
}

double memory_of_ranks(Group& group) {
  group.barrier(kTest);
  return sum_of_ranks(group, proportional_mebibytes_of_no_file());
}

int mappings_of(const std::string& name) {
  std::ifstream file("/proc/self/maps");
  std::string line;
  int count = 0;
  while (std::getline(file, line)) {
    count += line.find("memfd:" + name) != std::string::npos;
  }
  return count;
}

int open_segments() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry, gone).string();
    count += target.find("memfd:fsdp") != std::string::npos && target.find("fsdp-arena") == std::string::npos;
  }
  return count;
}

std::vector<Piece> pieces_of(int64_t mebibytes, int ranks, c10::ScalarType gathered = at::kFloat) {
  const int64_t numel = mebibytes << 18;
  return {piece(numel, even_chunk(numel, ranks), at::kFloat, gathered)};
}

int ended_with(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

// It has a copy of everything, and must not speak in its parent's place.
TEST(ShmMemory, AForkedChildIsNoRank) {
  on_processes(2, [] {
    const auto group = join_processes(process_folder());
    const auto home = group->make_home(pieces_of(1, 2), {}, kTest);
    auto gathered = home->gather(kTest);
    gathered->wait();
    const pid_t child = fork();
    if (child == 0) {
      const auto said = error_message([&] { group->barrier(kTest); });
      gathered.reset();
      _exit(contains(said, "a forked child") && !error_message([&] { home->gather(kTest); }).empty() ? 0 : 1);
    }
    EXPECT_EQ(ended_with(child), 0);
    for (int step = 0; step < 5; ++step) {
      gathered.reset();
      home->begin_write(kTest);
      view_of(home->slice(0), 10, at::kFloat).fill_(step);
      gathered = home->gather(kTest);
      gathered->wait();
      EXPECT_EQ(view_of(gathered->piece(0), 10, at::kFloat).sum().item<float>(), 10.0F * step);
    }
  });
}

TEST(ShmMemory, AModelIsInMemoryOnceAndGoesAway) {
  const auto body = [] {
    const auto group = join_processes(process_folder());
    const double start = memory_of_ranks(*group);
    std::vector<std::shared_ptr<Home>> homes;
    for (int i = 0; i < 4; ++i) {
      homes.push_back(group->make_home(pieces_of(16, group->size()), {}, kTest));
      const int64_t length = pieces_of(16, group->size())[0].length(group->rank());
      view_of(homes.back()->slice(0), length, at::kFloat).fill_(1);
    }
    for (const auto& home : homes) {
      const auto gathered = home->gather(kTest);
      gathered->wait();
      EXPECT_EQ(gathered->bytes(), 0);
      EXPECT_EQ(view_of(gathered->piece(0), 16 << 18, at::kFloat).sum().item<float>(), static_cast<float>(16 << 18));
    }
    const double with_model = memory_of_ranks(*group);
    EXPECT_GT(with_model - start, 60);
    EXPECT_LT(with_model - start, 80) << "64 MiB of parameters";
    homes.clear();
    EXPECT_LT(memory_of_ranks(*group) - start, 12);
  };
  on_processes(2, body);
}

TEST(ShmMemory, ConvertedUnitsShareOneUnitsMemory) {
  const auto body = [] {
    const auto group = join_processes(process_folder());
    std::vector<std::shared_ptr<Home>> homes;
    const auto pieces = pieces_of(16, group->size(), at::kBFloat16);
    for (int i = 0; i < 6; ++i) {
      homes.push_back(group->make_home(pieces, {}, kTest));
      view_of(homes.back()->slice(0), pieces[0].length(group->rank()), at::kFloat).fill_(1);
    }
    const double before = memory_of_ranks(*group);
    for (const auto& home : homes) {
      const auto gathered = home->gather(kTest);
      gathered->wait();
      EXPECT_EQ(gathered->bytes(), (int64_t{8} << 20) / group->size());
    }
    const double after = memory_of_ranks(*group);
    EXPECT_GT(after - before, 6);
    EXPECT_LT(after - before, 14) << "8 MiB at a time";
    homes.clear();
    EXPECT_LT(memory_of_ranks(*group) - before, -80) << "parameters and gathered ones are gone";
  };
  on_processes(2, body);
}

TEST(ShmMemory, GradientsAreNotCopied) {
  const auto body = [] {
    const auto group = join_processes(process_folder());
    const auto home = group->make_home(pieces_of(1, group->size()), {}, kTest);
    home->gather(kTest)->wait(); // which ends the sharding
    home->gather(kTest)->wait(); // from now on tensors lie in the arena, and freed memory is kept
    const int64_t numel = int64_t{32} << 18;
    const int64_t chunk = even_chunk(numel, group->size());
    const at::Tensor slice = at::zeros({chunk});
    const auto step = [&] {
      group->reduce_scatter({{at::ones({numel})}, {{numel, chunk}}, {slice}, 1}, kTest)->wait();
      group->barrier(kTest); // all have read it ...
      group->barrier(kTest); // ... and all let go of it
    };
    const double empty = memory_of_ranks(*group);
    step();
    const double before = memory_of_ranks(*group);
#ifndef __SANITIZE_THREAD__ // which keeps a memory beside the memory
    EXPECT_LT(before - empty, 64 + 8) << "each rank's gradient, once";
#endif
    for (int i = 0; i < 10; ++i) {
      step();
    }
    EXPECT_LT(memory_of_ranks(*group) - before, 16) << "the same memory every step: another block would be 32 MiB";
    EXPECT_TRUE(slice.eq(static_cast<float>(group->size())).all().item<bool>());
  };
  on_processes(2, body);
}

TEST(ShmMemory, ABroadcastKeepsNoTensor) {
  on_threads(2, [] {
    at::Tensor tensor = at::ones({100000});
    const auto memory = tensor.storage().getWeakStorageImpl();
    current_world()->group->broadcast(tensor, 0, kTest);
    tensor.reset();
    EXPECT_TRUE(memory.expired()) << "on rank " << current_world()->group->rank();
  });
}

TEST(ShmMemory, NothingIsLeftOfAGroup) {
  const auto body = [] {
    for (int round = 0; round < 3; ++round) {
      auto group = join_processes(process_folder() / std::to_string(round));
      auto part = group->split(0, kTest);
      const auto pieces = with_casts(group->size());
      {
        const auto home = part->make_home(pieces, {}, kTest);
        fill_slices(*part, *home, pieces, 1);
        home->gather(kTest)->wait();
        EXPECT_GT(mappings_of("fsdp-home"), 0);
        EXPECT_GT(mappings_of("fsdp-gathered"), 0);
        EXPECT_GT(mappings_of("fsdp-group"), 0);
        EXPECT_EQ(open_segments(), 0) << "nobody can join any more";
      }
      EXPECT_EQ(mappings_of("fsdp-home"), 0);
      EXPECT_EQ(mappings_of("fsdp-gathered"), 0);
      part.reset();
      group.reset();
      EXPECT_EQ(mappings_of("fsdp-group"), 0);
      EXPECT_EQ(mappings_of("fsdp-arena"), 1) << "this process's own";
    }
  };
  const auto with_folders = [&] {
    for (int round = 0; round < 3; ++round) {
      std::filesystem::create_directories(process_folder() / std::to_string(round));
    }
    body();
  };
  on_processes(2, with_folders);
}

// What the design promises of a gather that moves no bytes: it is no collective.
TEST(ShmMemory, ARankMayReadAlone) {
  const auto body = [] {
    const auto group = current_world()->group;
    const auto pieces = all_sorts(group->size());
    const auto home = group->make_home(pieces, {}, kTest);
    const auto other = group->make_home(pieces, {}, kTest);
    fill_slices(*group, *home, pieces, 1);
    const auto read_alone = [&](int64_t seed) {
      if (group->rank() == 0) {
        for (int i = 0; i < 3; ++i) {
          const auto gathered = home->gather(kTest);
          gathered->wait();
          expect_pieces(*gathered, pieces, seed);
        }
      }
    };
    read_alone(1); // fresh: the others' barrier shows their writes
    group->barrier(kTest);
    home->gather(kTest)->wait();
    read_alone(1);
    fill_slices(*group, *home, pieces, 2);
    read_alone(2); // after writes
    group->barrier(kTest);
    fill_slices(*group, *other, pieces, 3);
    for (int64_t seed = 4; seed < 20; ++seed) { // and the turns go on
      fill_slices(*group, *home, pieces, seed);
      const auto gathered = home->gather(kTest);
      gathered->wait();
      expect_pieces(*gathered, pieces, seed);
    }
    const auto gathered = other->gather(kTest);
    gathered->wait();
    expect_pieces(*gathered, pieces, 3);
    group->barrier(kTest);
  };
  on_threads(3, body);
}

// Python's garbage collector takes owners on whatever thread it runs.
TEST(ShmMemory, WhatNobodyWaitedForMayGoOnAnyThread) {
  on_processes(2, [] {
    const auto group = join_processes(process_folder(), std::chrono::seconds(60));
    for (int round = 0; round < 100; ++round) {
      std::vector<std::unique_ptr<Work>> left;
      for (int i = 0; i < 20; ++i) {
        left.push_back(start_reduce(*group, {.numels = {50}, .simple = true}).work);
      }
      group->barrier(kTest); // all have been read
      std::thread owner([&] { left.clear(); });
      for (int i = 0; i < 20; ++i) {
        auto reduced = start_reduce(*group, {.numels = {50}, .seed = i, .simple = true});
        reduced.work->wait();
        reduced.expect_equal();
      }
      owner.join();
    }
    group->barrier(kTest);
  });
}

} // namespace
} // namespace fsdp::testing
