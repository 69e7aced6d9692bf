#pragma once

#include "comm/group_checks.h"

/// What every Group has to do, whatever it is made of. A backend joins with
/// `INSTANTIATE_TEST_SUITE_P(Name, Conformance, ::testing::ValuesIn(...), backend_name)`. Included by one file of a
/// program.
namespace fsdp::testing {

class Conformance : public ::testing::TestWithParam<Backend> {
 protected:
  void run(const RankBody& body, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    GetParam().run(GetParam().ranks, timeout, body);
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Conformance);

TEST_P(Conformance, KnowsItsRanks) {
  run([&](const GroupPointer& group) {
    EXPECT_EQ(group->size(), GetParam().ranks);
    EXPECT_GE(group->rank(), 0);
    EXPECT_LT(group->rank(), group->size());
    EXPECT_FALSE(group->name().empty());
  });
}

TEST_P(Conformance, GatherShowsEverySlice) {
  run([](const GroupPointer& group) {
    const auto pieces = all_sorts(group->size());
    const auto home = group->make_home(pieces, {}, kTest);
    fill_slices(*group, *home, pieces, 1);
    const auto gathered = home->gather(kTest);
    gathered->wait();
    expect_pieces(*gathered, pieces, 1);
    group->barrier(kTest);
  });
}

TEST_P(Conformance, GatherConvertsToTheGatheredDtype) {
  run([](const GroupPointer& group) {
    const auto pieces = with_casts(group->size());
    const auto home = group->make_home(pieces, {}, kTest);
    for (int64_t seed = 1; seed < 4; ++seed) {
      fill_slices(*group, *home, pieces, seed);
      const auto gathered = home->gather(kTest);
      gathered->wait();
      expect_pieces(*gathered, pieces, seed);
      EXPECT_GT(gathered->bytes(), 0);
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, RewrittenSlicesAreReadAsTheyWereAtTheGather) {
  run([](const GroupPointer& group) {
    const auto pieces = all_sorts(group->size());
    const auto home = group->make_home(pieces, {.rewritten = true}, kTest);
    std::mt19937 random(static_cast<unsigned>(group->rank()));
    for (int64_t seed = 1; seed < 30; ++seed) { // no rank waits until the others have read the last ones
      fill_slices(*group, *home, pieces, seed);
      const auto gathered = home->gather(kTest);
      gathered->wait();
      nap(random, 300);
      expect_pieces(*gathered, pieces, seed);
      EXPECT_TRUE(group->size() == 1 || gathered->bytes() > 0);
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, PiecesStartOnCacheLines) {
  run([](const GroupPointer& group) {
    const auto pieces = with_casts(group->size());
    const auto home = group->make_home(pieces, {}, kTest);
    fill_slices(*group, *home, pieces, 1);
    const auto gathered = home->gather(kTest);
    gathered->wait();
    for (size_t i = 0; i < pieces.size(); ++i) {
      EXPECT_TRUE(pieces[i].numel == 0 || reinterpret_cast<uintptr_t>(gathered->piece(i)) % 64 == 0) << i;
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, HomesOfNothingWork) {
  run([](const GroupPointer& group) {
    const auto none = group->make_home({}, {}, kTest);
    none->begin_write(kTest);
    none->gather(kTest)->wait();
    const std::vector<Piece> empty{piece(0, 0, at::kFloat), piece(0, 0, at::kFloat, at::kHalf)};
    const auto home = group->make_home(empty, {}, kTest);
    home->begin_write(kTest);
    home->gather(kTest)->wait();
    group->barrier(kTest);
  });
}

// Writes and reads take turns however fast or slow each rank is: a reader sees all of one generation and nothing of
// another.
TEST_P(Conformance, WritesAndReadsTakeTurns) {
  run([](const GroupPointer& group) {
    const auto pieces = all_sorts(group->size());
    std::vector<std::shared_ptr<Home>> homes;
    for (int h = 0; h < 3; ++h) {
      homes.push_back(group->make_home(pieces, {}, kTest));
    }
    std::mt19937 random(static_cast<unsigned>(group->rank()));
    for (int64_t generation = 0; generation < 25; ++generation) {
      for (size_t h = 0; h < homes.size(); ++h) {
        nap(random, 200);
        fill_slices(*group, *homes[h], pieces, 100 * generation + static_cast<int64_t>(h));
      }
      for (int again = 0; again < 2; ++again) {
        for (size_t h = 0; h < homes.size(); ++h) {
          const auto gathered = homes[h]->gather(kTest);
          nap(random, 100);
          gathered->wait();
          nap(random, 200);
          expect_pieces(*gathered, pieces, 100 * generation + static_cast<int64_t>(h));
        }
      }
    }
    group->barrier(kTest);
  });
}

// As an engine that prefetches: the next home is gathered before the last one is released.
TEST_P(Conformance, OverlappingGathersDoNotDisturbEachOther) {
  run([](const GroupPointer& group) {
    const auto pieces = with_casts(group->size());
    std::vector<std::shared_ptr<Home>> homes;
    for (int h = 0; h < 5; ++h) {
      homes.push_back(group->make_home(pieces, {}, kTest));
    }
    std::mt19937 random(static_cast<unsigned>(group->rank()));
    for (int64_t generation = 0; generation < 30; ++generation) {
      for (size_t h = 0; h < homes.size(); ++h) {
        fill_slices(*group, *homes[h], pieces, 100 * generation + static_cast<int64_t>(h));
      }
      std::unique_ptr<Gathered> next = homes[0]->gather(kTest);
      for (size_t h = 0; h < homes.size(); ++h) {
        const auto current = std::move(next);
        next = h + 1 < homes.size() ? homes[h + 1]->gather(kTest) : nullptr;
        current->wait();
        nap(random, 300);
        expect_pieces(*current, pieces, 100 * generation + static_cast<int64_t>(h));
      }
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, OwnersMayGoInAnyOrder) {
  run([](GroupPointer group) { // a copy: the test lets go of it
    const auto pieces = with_casts(group->size());
    auto home = group->make_home(pieces, {}, kTest);
    fill_slices(*group, *home, pieces, 5);
    auto gathered = home->gather(kTest);
    gathered->wait();
    auto reduced = start_reduce(*group, {.numels = {100}, .simple = true});
    group->barrier(kTest);
    home.reset();
    group.reset();
    expect_pieces(*gathered, pieces, 5);
    reduced.work->wait();
    reduced.expect_equal();
  });
}

TEST_P(Conformance, HomesComeAndGo) {
  run([](const GroupPointer& group) {
    const auto pieces = with_casts(group->size());
    for (int64_t round = 0; round < 10; ++round) {
      auto first = group->make_home(pieces, {}, kTest);
      auto second = group->make_home(all_sorts(group->size()), {}, kTest);
      fill_slices(*group, *first, pieces, round);
      fill_slices(*group, *second, all_sorts(group->size()), round);
      auto gathered = first->gather(kTest);
      gathered->wait();
      expect_pieces(*gathered, pieces, round);
      if (group->rank() % 2 == 0) {
        first.reset();
        gathered.reset(); // at other moments on other ranks
      }
      auto other = second->gather(kTest);
      other->wait();
      expect_pieces(*other, all_sorts(group->size()), round);
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, ReduceScatterSumsEveryDtype) {
  run([&](const GroupPointer& group) {
    const bool simple = !GetParam().sums_in_rank_order;
    for (const auto dtype :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kComplexFloat}) {
      for (const double divide_by : {1.0, 4.0}) {
        auto reduced = start_reduce(*group, {{1000, 3, 4096}, dtype, divide_by, 3, simple});
        reduced.work->wait();
        reduced.expect_equal();
      }
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, ReduceScatterTakesTensorsOfAnySize) {
  run([](const GroupPointer& group) {
    for (const auto& numels :
         std::vector<std::vector<int64_t>>{{}, {0}, {1}, {0, 1, 0, 2}, {5, 7, 100'003}, {1'000'000}}) {
      auto reduced = start_reduce(*group, {.numels = numels, .divide_by = 2, .simple = true});
      reduced.work->wait();
      reduced.expect_equal();
    }
    group->barrier(kTest);
  });
}

// As the parameters of a flat one: in their order, some left out, cut wherever a share ends.
TEST_P(Conformance, ReduceScatterTakesPartsOfOneTensor) {
  run([](const GroupPointer& group) {
    for (const int64_t chunk : {1, 4, 7, 100}) {
      std::vector<Cut> cuts;
      for (int64_t before = 0, i = 0; before < chunk * group->size(); ++i) {
        const int64_t numel = std::min(i * 5 % 13, chunk * group->size() - before);
        if (i % 4 != 0) {
          cuts.push_back({numel, chunk, before});
        }
        before += numel;
      }
      auto reduced = start_reduce_of_cuts(*group, cuts, {.numels = {}, .divide_by = 2, .simple = true});
      reduced.work->wait();
      reduced.expect_equal();
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, ReduceScatterTakesManyTensors) {
  run([](const GroupPointer& group) {
    ToReduce many{.numels = {}, .simple = true};
    for (int64_t i = 0; i < 150; ++i) {
      many.numels.push_back(1 + i * 37 % 101);
    }
    auto reduced = start_reduce(*group, many);
    reduced.work->wait();
    reduced.expect_equal();
    group->barrier(kTest);
  });
}

// As rows of equal length they would be mostly padding.
TEST_P(Conformance, ReduceScatterTakesThousandsOfSingleNumbers) {
  run([](const GroupPointer& group) {
    ToReduce many{.numels = std::vector<int64_t>(6000, 1), .divide_by = 4, .simple = true};
    many.numels[1] = 5;
    many.numels[2] = 0;
    for (const auto dtype : {at::kFloat, at::kHalf, at::kInt}) {
      many.dtype = dtype;
      auto reduced = start_reduce(*group, many);
      reduced.work->wait();
      reduced.expect_equal();
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, ManyReductionsMayBeInFlight) {
  run([](const GroupPointer& group) {
    std::mt19937 random(static_cast<unsigned>(group->rank()));
    for (int round = 0; round < 5; ++round) {
      std::vector<Reduced> flying;
      for (int64_t i = 0; i < 30; ++i) {
        flying.push_back(
            start_reduce(*group, {.numels = {1000 + i, 40'000}, .divide_by = 2, .seed = i, .simple = true}));
        nap(random, 300);
        flying[random() % flying.size()].work->done();
      }
      std::reverse(flying.begin(), flying.end());
      for (Reduced& reduced : flying) {
        reduced.work->wait();
        EXPECT_TRUE(reduced.work->done());
        reduced.expect_equal();
      }
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, DoneBecomesTrueByItself) {
  run([](const GroupPointer& group) {
    auto reduced = start_reduce(*group, {.numels = {50'000}, .simple = true});
    while (!reduced.work->done()) {
      std::this_thread::yield();
    }
    reduced.work->wait();
    reduced.expect_equal();
    group->barrier(kTest);
  });
}

TEST_P(Conformance, ReduceScatterMayOverlapGathers) {
  run([](const GroupPointer& group) {
    const auto pieces = with_casts(group->size());
    const auto home = group->make_home(pieces, {}, kTest);
    for (int64_t step = 0; step < 20; ++step) {
      fill_slices(*group, *home, pieces, step);
      auto first = start_reduce(*group, {.numels = {3000}, .seed = step, .simple = true});
      const auto gathered = home->gather(kTest);
      auto second = start_reduce(*group, {.numels = {60'000}, .seed = step + 1, .simple = true});
      gathered->wait();
      expect_pieces(*gathered, pieces, step);
      second.work->wait();
      first.work->wait();
      first.expect_equal();
      second.expect_equal();
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, ReduceScatterKeepsTheWholesUntilTheyAreRead) {
  run([](const GroupPointer& group) {
    std::mt19937 random(static_cast<unsigned>(group->rank()));
    for (int64_t i = 0; i < 40; ++i) {
      auto reduced = start_reduce(*group, {.numels = {70'000}, .seed = i, .simple = true});
      reduced.work->wait(); // the wholes go; other memory of that size comes
      const at::Tensor trap = at::full({70'000}, -1.0f);
      nap(random, 500);
      reduced.expect_equal();
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, ReduceScatterLeavesTheWholesToTheirOwnerOnceItIsOver) {
  run([](const GroupPointer& group) {
    std::mt19937 random(static_cast<unsigned>(group->rank()));
    const int ranks = group->size();
    const Cut cut{70'000, even_chunk(70'000, ranks)};
    for (int round = 0; round < 40; ++round) {
      const at::Tensor whole = at::full({cut.numel}, group->rank() + 1 + round, at::kFloat);
      const at::Tensor slice = at::empty({cut.length(group->rank())}, at::kFloat);
      const auto work = group->reduce_scatter({.wholes = {whole}, .cuts = {cut}, .slices = {slice}}, kTest);
      nap(random, 500);
      work->wait();
      whole.fill_(-1);
      EXPECT_TRUE(slice.eq(ranks * round + ranks * (ranks + 1) / 2).all().item<bool>()) << "round " << round;
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, AllReduceCombinesAllRanks) {
  run([&](const GroupPointer& group) {
    for (const int64_t numel : {0, 1, 3, 100, 5000, 300'001, 800'000}) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kComplexFloat}) {
        if (numel == 800'000 && dtype != at::kFloat) {
          continue;
        }
        const bool half = dtype == at::kHalf || dtype == at::kBFloat16; // which no backend on the host combines
        const bool simple = !GetParam().sums_in_rank_order && !half;
        std::vector<at::Tensor> of_ranks;
        at::Tensor most;
        at::Tensor least;
        for (int r = 0; r < group->size(); ++r) {
          of_ranks.push_back(numbers(numel, dtype, r + 1, simple));
          if (dtype != at::kComplexFloat) {
            most = r ? at::maximum(most, of_ranks.back()) : of_ranks.back();
            least = r ? at::minimum(least, of_ranks.back()) : of_ranks.back();
          }
        }
        const at::Tensor& mine = of_ranks[static_cast<size_t>(group->rank())];
        const auto reduced = [&](ReduceOp op, double divide_by) {
          at::Tensor tensor = mine.clone();
          group->all_reduce(tensor, op, divide_by, kTest)->wait();
          return tensor;
        };
        EXPECT_TRUE(same_bits(reduced(ReduceOp::kSum, 1), rank_ordered(of_ranks, 1))) << numel << c10::toString(dtype);
        EXPECT_TRUE(same_bits(reduced(ReduceOp::kSum, 2), rank_ordered(of_ranks, 2))) << numel << c10::toString(dtype);
        if (dtype == at::kComplexFloat) {
          continue; // has no order
        }
        EXPECT_TRUE(same_bits(reduced(ReduceOp::kMax, 1), most)) << numel << c10::toString(dtype);
        EXPECT_TRUE(same_bits(reduced(ReduceOp::kMin, 1), least)) << numel << c10::toString(dtype);
      }
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, MaximaAndMinimaOfWhatIsNoNumberAreNoNumbers) {
  run([](const GroupPointer& group) {
    const int64_t size = group->size();
    for (const int64_t numel : {size, 30'000 * size}) {
      for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
        for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
          at::Tensor tensor = at::ones({numel}, dtype);
          const at::Tensor missing = at::arange(numel).remainder(size).eq(group->rank()); // somewhere on each rank
          tensor.masked_fill_(missing, std::numeric_limits<double>::quiet_NaN());
          group->all_reduce(tensor, op, 1, kTest)->wait();
          EXPECT_TRUE(tensor.isnan().all().item<bool>()) << numel << c10::toString(dtype);
        }
      }
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, AllReducesMayBeInFlight) {
  run([](const GroupPointer& group) {
    std::vector<at::Tensor> tensors;
    std::vector<std::unique_ptr<Work>> works;
    for (int64_t i = 0; i < 12; ++i) {
      tensors.push_back(at::full({i % 2 ? 5 : 90'000}, static_cast<float>(i + group->rank())));
      works.push_back(group->all_reduce(tensors.back(), ReduceOp::kSum, 1, kTest));
    }
    const float ranks = static_cast<float>(group->size());
    for (size_t i = 0; i < works.size(); ++i) {
      works[i]->wait();
      const float expected = ranks * static_cast<float>(i) + ranks * (ranks - 1) / 2;
      EXPECT_TRUE(tensors[i].eq(expected).all().item<bool>()) << i;
      tensors[i].zero_(); // it is ours again
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, BroadcastReachesAllRanksFromAnyRoot) {
  run([](const GroupPointer& group) {
    for (int root = 0; root < group->size(); ++root) {
      for (const int64_t numel : {0, 1, 50, 200'000}) {
        const at::Tensor expected = numbers(numel, at::kFloat, root + 10);
        at::Tensor tensor = group->rank() == root ? expected.clone() : at::zeros({numel});
        group->broadcast(tensor, root, kTest);
        EXPECT_TRUE(same_bits(tensor, expected));
        tensor.zero_(); // nobody reads it any more
      }
    }
    group->barrier(kTest);
  });
}

TEST_P(Conformance, ExchangeTakesBytesOfAnyLength) {
  run([](const GroupPointer& group) {
    for (const size_t length : {0, 1, 200, 5000, 300'000}) {
      const auto bytes_of = [&](int rank) {
        return std::string(length + static_cast<size_t>(rank) * 3, static_cast<char>('a' + rank)) + '\0';
      };
      const auto all = group->exchange(bytes_of(group->rank()), kTest);
      ASSERT_EQ(static_cast<int>(all.size()), group->size());
      for (int r = 0; r < group->size(); ++r) {
        EXPECT_EQ(all[static_cast<size_t>(r)], bytes_of(r));
      }
    }
  });
}

TEST_P(Conformance, BarrierWaitsForAll) {
  run([](const GroupPointer& group) {
    for (int slow = 0; slow < group->size(); ++slow) {
      const auto start = std::chrono::steady_clock::now();
      group->barrier(kTest); // who is woken from it late may find the slow one at the next
      if (group->rank() == slow) {
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
      }
      group->barrier(kTest);
      EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(60));
    }
  });
}

TEST_P(Conformance, SplitMakesGroupsThatWorkAlone) {
  if (!GetParam().splits) {
    GTEST_SKIP() << "the backend has no split";
  }
  run([](const GroupPointer& group) {
    const int color = group->rank() % 2;
    const auto part = group->split(color, kTest);
    EXPECT_EQ(part->size(), (group->size() + 1 - color) / 2);
    EXPECT_EQ(part->rank(), group->rank() / 2);
    EXPECT_EQ(part->name() == "alone", part->size() == 1); // which shares nothing and waits for nobody
    auto reduced = start_reduce(*part, {.numels = {1000}, .simple = true});
    at::Tensor sum = at::ones({1});
    part->all_reduce(sum, ReduceOp::kSum, 1, kTest)->wait();
    EXPECT_EQ(sum.item<float>(), static_cast<float>(part->size()));
    reduced.work->wait();
    reduced.expect_equal();
    const auto pieces = with_casts(part->size());
    const auto home = part->make_home(pieces, {}, kTest);
    fill_slices(*part, *home, pieces, color);
    const auto gathered = home->gather(kTest);
    gathered->wait();
    expect_pieces(*gathered, pieces, color);
    part->barrier(kTest);
    group->barrier(kTest);
  });
}

TEST_P(Conformance, DifferentCollectivesAreToldApart) {
  if (!GetParam().checks_order || GetParam().ranks < 2) {
    GTEST_SKIP() << "the order is not checked here";
  }
  run([](const GroupPointer& group) {
    const bool odd = group->rank() == 1;
    const Label mine = odd ? Label{"unshard", "head"} : Label{"reduce gradients", "blocks.3"};
    const std::string message = comm_error([&] {
      if (odd) {
        group->barrier(mine);
      } else {
        start_reduce(*group, {.numels = {10}}, mine).work->wait();
      }
    });
    EXPECT_TRUE(mentions(message, "reduce gradients of 'blocks.3'"));
    EXPECT_TRUE(mentions(message, "unshard of 'head'"));
  });
}

TEST_P(Conformance, DifferentSizesAreToldApart) {
  if (!GetParam().checks_order || GetParam().ranks < 2) {
    GTEST_SKIP() << "the order is not checked here";
  }
  run([](const GroupPointer& group) {
    const std::string message = comm_error([&] {
      start_reduce(*group, {.numels = {group->rank() == 1 ? 10 : 20}}, {"reduce gradients", "head"}).work->wait();
    });
    EXPECT_TRUE(mentions(message, "head"));
    EXPECT_TRUE(mentions(message, "must agree"));
  });
}

TEST_P(Conformance, WaitingHasAnEnd) {
  if (GetParam().ranks != 3) {
    GTEST_SKIP() << "one number of ranks is enough for what takes its time";
  }
  const auto timeout = std::chrono::seconds(10); // also for the making of the group
  run(
      [&](const GroupPointer& group) {
        if (group->rank() == 1) { // does not come in time
          std::this_thread::sleep_for(timeout + std::chrono::seconds(5));
          return;
        }
        const auto start = std::chrono::steady_clock::now();
        const std::string message = comm_error([&] { group->barrier({"unshard", "blocks.2"}); });
        EXPECT_LT(std::chrono::steady_clock::now() - start, timeout + std::chrono::seconds(60));
        EXPECT_TRUE(mentions(message, "blocks.2"));
        if (GetParam().names_peers) {
          EXPECT_TRUE(mentions(message, "rank 1"));
        }
      },
      timeout);
}

TEST_P(Conformance, AbortReachesTheOthers) {
  if (GetParam().ranks < 2) {
    GTEST_SKIP() << "nobody to tell";
  }
  run([&](const GroupPointer& group) {
    if (group->rank() == 1) {
      group->abort("the data ran out");
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    const std::string message = comm_error([&] { group->barrier(kTest); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
    if (GetParam().names_peers) {
      EXPECT_TRUE(mentions(message, "the data ran out"));
    }
    comm_error([&] { group->barrier(kTest); }); // and ever after
  });
}

TEST_P(Conformance, BadArgumentsAreErrorsAndHarmless) {
  run([](const GroupPointer& group) {
    const at::Tensor whole = at::zeros({10});
    const int64_t chunk = even_chunk(10, group->size());
    EXPECT_THROW(group->reduce_scatter({{whole}, {{10, chunk}}, {}, 1}, kTest), Error);
    if (group->size() > 1) {
      EXPECT_THROW(group->reduce_scatter({{whole}, {{10, chunk}}, {at::zeros({99})}, 1}, kTest), Error);
      EXPECT_THROW(group->reduce_scatter({{whole}, {{9, chunk}}, {at::zeros({chunk})}, 1}, kTest), Error);
      EXPECT_THROW(group->reduce_scatter({{whole}, {{10, chunk, 100}}, {at::zeros({0})}, 1}, kTest), Error);
      EXPECT_THROW(group->make_home({piece(10, 1, at::kFloat)}, {}, kTest), Error);
      EXPECT_THROW(group->all_reduce(at::zeros({2}, at::kComplexFloat), ReduceOp::kMax, 1, kTest), Error);
    }
    const at::Tensor complex = at::ones({10}, at::kComplexFloat);
    for (const at::Tensor& view : {complex.conj(), at::_neg_view(whole), whole.to_sparse()}) {
      EXPECT_THROW(group->all_reduce(view, ReduceOp::kSum, 1, kTest), Error) << view.sizes();
      EXPECT_THROW(group->broadcast(view, 0, kTest), Error);
    }
    EXPECT_THROW(group->broadcast(at::zeros({1}), group->size(), kTest), Error);
    group->barrier(kTest);
  });
}

} // namespace fsdp::testing
