#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "comm/c10d/buffer_pool.h"
#include "comm/c10d/order_check.h"
#include "comm/payload.h"
#include "comm/rank_major.h"
#include "comm/reduce.h"
#include "support/count_operators.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

using namespace adapter;

TEST(Payload, KeepsDtypesTogetherAndEndsOnSixteenBytes) {
  const std::vector<Piece> pieces{
      {10, 5, at::kFloat, at::kBFloat16},
      {3, 2, at::kDouble, at::kDouble},
      {0, 0, at::kFloat, at::kFloat},
      {7, 4, at::kFloat, at::kBFloat16}};
  const Payload stored(pieces, &Piece::stored);
  EXPECT_EQ(stored.slots[1].offset, 0); // the widest first
  EXPECT_EQ(stored.slots[0].offset, 16);
  EXPECT_EQ(stored.slots[3].offset, 16 + 5 * 4); // adjacent
  EXPECT_EQ(stored.bytes, 64);
  EXPECT_EQ(stored.order, (std::vector<size_t>{1, 0, 3}));
  const Payload gathered(pieces, &Piece::gathered);
  EXPECT_EQ(gathered.slots[0].bytes, 10);
  EXPECT_EQ(gathered.slots[3].offset, 16 + 10);
  EXPECT_EQ(gathered.bytes, 48);
}

TEST(Payload, WholePiecesStartOnCacheLines) {
  const WholePieces wholes({{10, 5, at::kFloat, at::kBFloat16}, {3, 2, at::kDouble, at::kDouble}}, 2);
  EXPECT_EQ(wholes.offsets[1], 64);
  EXPECT_EQ(wholes.bytes, 128);
}

TEST(RankMajor, RowsHoldTheRanksSlicesAndZerosBetween) {
  const ReduceScatter args{
      .wholes = {at::arange(1, 6, at::kFloat), at::arange(10, 13, at::kFloat)}, .cuts = {{5, 2}, {3, 2}}, .slices = {}};
  const RankMajor layout(args, 0, 3);
  EXPECT_EQ(layout.row(), 4);
  const at::Tensor matrix = at::full({12}, -1.0f);
  layout.pack(args, matrix);
  const at::Tensor expected = at::tensor({1, 2, 10, 11, 3, 4, 12, 0, 5, 0, 0, 0}, at::kFloat);
  EXPECT_TRUE(matrix.equal(expected)) << matrix;
}

// Chunks as `torch.chunk` makes them of rows of 6, 1, 5 and 4 numbers; then longer ones.
TEST(RankMajor, OperatorsPackAsTheHostDoesHoweverManyRanks) {
  for (const int ranks : {2, 3, 5, 1024}) {
    const auto even = [&](int64_t rows, int64_t length) { return (rows + ranks - 1) / ranks * length; };
    const ReduceScatter args{
        .wholes = {at::rand({7 * 6}), at::rand({1}), at::rand({0}), at::rand({1030 * 5}), at::rand({9 * 4})},
        .cuts = {{42, even(7, 6)}, {1, 1}, {0, 0}, {5150, even(1030, 5)}, {36, even(9, 4)}},
        .slices = {}};
    ReduceScatter longer = args;
    longer.cuts[0].chunk += 5;
    longer.cuts[2].chunk = 3;
    for (const auto& [each, most] : {std::pair(args, 2), std::pair(longer, 2)}) {
      const RankMajor layout(each, 0, ranks);
      const at::Tensor expected = at::full({ranks * layout.row()}, -1.0f), matrix = expected.clone();
      layout.pack(each, expected);
      EXPECT_LE(count_operators([&] { layout.pack_by_operators(each, matrix); }), most) << ranks << " ranks";
      EXPECT_TRUE(matrix.equal(expected)) << ranks << " ranks";
    }
  }
}

// Three parts of a flat tensor of twelve, with gaps before and between, then one that is cut by itself.
TEST(RankMajor, PartsOfOneTensorFollowOneAnotherWhateverRowTheyEndIn) {
  const ReduceScatter args{
      .wholes =
          {at::arange(1, 6, at::kFloat), at::tensor({7.f}), at::arange(9, 12, at::kFloat), at::tensor({20.f, 21.f})},
      .cuts = {{5, 4, 1}, {1, 4, 7}, {3, 4, 8}, {2, 1}},
      .slices = {}};
  const at::Tensor expected =
      at::tensor({0, 1, 2, 3, 20, 0, 0, 0, 4, 5, 0, 7, 21, 0, 0, 0, 9, 10, 11, 0, 0, 0, 0, 0}, at::kFloat);
  for (const bool on_host : {true, false}) {
    const at::Tensor matrix = at::full({24}, -1.0f);
    const RankMajor layout(args, 1, 3);
    on_host ? layout.pack(args, matrix) : layout.pack_by_operators(args, matrix);
    EXPECT_TRUE(matrix.equal(expected)) << matrix;
  }
  EXPECT_EQ(RankMajor(args, 0, 3).offsets(), (std::vector<int64_t>{1, 4, 4, 4})); // where they begin, if they do
  EXPECT_EQ(RankMajor(args, 1, 3).offsets(), (std::vector<int64_t>{0, 3, 4, 4}));
  EXPECT_EQ(RankMajor(args, 2, 3).offsets(), (std::vector<int64_t>{0, 0, 0, 4}));
}

TEST(RankMajor, ATensorThatLiesRightIsNotCopied) {
  const at::Tensor whole = at::ones({4, 4});
  const ReduceScatter fits{.wholes = {whole}, .cuts = {{16, 4}}, .slices = {}};
  EXPECT_EQ(RankMajor(fits, 0, 4).as_it_is(fits).data_ptr(), whole.data_ptr());
  const ReduceScatter uneven{.wholes = {at::ones({15})}, .cuts = {{15, 4}}, .slices = {}};
  EXPECT_FALSE(RankMajor(uneven, 0, 4).as_it_is(uneven).defined());
}

TEST(BufferPool, GivesABufferOfFittingSizeAgain) {
  BufferPool pool;
  const auto keeper = pool.keep_idle();
  const at::Tensor first = pool.take(1000, c10::kCPU);
  const void* memory = first.data_ptr();
  pool.give_back(first);
  EXPECT_EQ(pool.take(900, c10::kCPU).data_ptr(), memory);
}

TEST(BufferPool, IdleMemoryMakesWayForABiggerBuffer) {
  BufferPool pool;
  const auto keeper = pool.keep_idle();
  at::Tensor small = pool.take(1000, c10::kCPU);
  const c10::weak_intrusive_ptr<c10::TensorImpl> watched(small.getIntrusivePtr());
  pool.give_back(std::move(small));
  EXPECT_FALSE(watched.expired());
  pool.take(5000, c10::kCPU);
  EXPECT_TRUE(watched.expired());
}

TEST(BufferPool, KeepsNothingWhenNobodyIsLeft) {
  BufferPool pool;
  auto first = pool.keep_idle(), second = pool.keep_idle();
  at::Tensor buffer = pool.take(1000, c10::kCPU);
  const c10::weak_intrusive_ptr<c10::TensorImpl> watched(buffer.getIntrusivePtr());
  pool.give_back(std::move(buffer));
  first.reset();
  EXPECT_FALSE(watched.expired());
  second.reset();
  EXPECT_TRUE(watched.expired());
  pool.give_back(pool.take(1000, c10::kCPU)); // as plain memory then
}

TEST(Division, OnlyFp16DividesBeforeTheSum) {
  EXPECT_EQ(Division(64, at::kFloat, /*sum_may_overflow=*/true).before, 1);
  EXPECT_EQ(Division(64, at::kBFloat16, /*sum_may_overflow=*/true).before, 1);
  const Division half(64, at::kHalf, /*sum_may_overflow=*/true);
  EXPECT_EQ(half.before, 8);
  EXPECT_EQ(half.after, 8);
  const Division odd(6, at::kHalf, /*sum_may_overflow=*/true);
  EXPECT_EQ(odd.before * odd.after, 6);
  EXPECT_EQ(Division(64, at::kHalf, /*sum_may_overflow=*/false).after, 64);
}

TEST(Division, DividesTruly) {
  const at::Tensor tensor = at::tensor({1.0f, 10.0f});
  const at::Tensor expected = tensor / 3;
  divide_(tensor, 3);
  EXPECT_TRUE(tensor.equal(expected));
  const at::Tensor integers = at::tensor({7, -7}, at::kLong);
  divide_(integers, 2);
  EXPECT_TRUE(integers.equal(at::tensor({3, -3}, at::kLong)));
}

TEST(OrderCheck, NamesBothSides) {
  const auto record = [](const char* operation, const std::string& unit) {
    return order_record({{operation, unit}, "all-gather", 4}, 100, c10::kCPU);
  };
  EXPECT_EQ(find_mismatch(at::cat({record("unshard", "a"), record("unshard", "a")}), 0, 2), "");
  const std::string text = find_mismatch(at::cat({record("unshard", "a"), record("reduce", "b")}), 1, 2);
  const auto broken_off = at::zeros_like(record("reduce", "b"));
  EXPECT_EQ(find_mismatch(at::cat({record("unshard", "a"), broken_off}), 0, 2), "");
  EXPECT_EQ(find_mismatch(at::cat({record("unshard", "a"), broken_off}), 1, 2), "");
  EXPECT_TRUE(contains(text, "rank 1 calls reduce of 'b'"));
  EXPECT_TRUE(contains(text, "rank 0 calls unshard of 'a'"));
}

TEST(OrderCheck, LongNamesKeepTheirEnds) {
  const auto record = [](char last) {
    return order_record({{"unshard", std::string(500, 'x') + last}, "all-gather", 0}, 1, c10::kCPU);
  };
  EXPECT_NE(find_mismatch(at::cat({record('a'), record('b')}), 0, 2), "");
}

} // namespace
} // namespace fsdp::testing
