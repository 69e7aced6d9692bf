#include "layout/param_layout.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "support/count_operators.h"

namespace fsdp::layout {
namespace {

struct Shape {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides; // empty: contiguous
};

std::vector<Shape> shapes() {
  return {
      {{}, {}},
      {{7}, {}},
      {{1}, {}},
      {{0, 4}, {}},
      {{4, 0}, {}},
      {{8, 3}, {}},
      {{3, 5, 2}, {}},
      {{5, 3}, {1, 5}},
      {{4, 2, 3, 3}, {18, 1, 6, 2}}};
}

at::Tensor counted(const Shape& shape) {
  const auto strides = shape.strides.empty() ? contiguous_strides(shape.sizes) : shape.strides;
  auto tensor = at::empty_strided(shape.sizes, strides, at::kFloat);
  return tensor.copy_(at::arange(tensor.numel(), at::kFloat).view(shape.sizes));
}

TEST(ParamLayout, ShardsAreThoseOfTorchChunk) {
  const Shape shape{{7, 3}, {}};
  const auto whole = counted(shape);
  const auto chunks = whole.chunk(4, 0);
  const ParamLayout layout(shape.sizes, whole.strides().vec(), 0, 4);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(c10::IntArrayRef(layout.shard_sizes(rank)), chunks[rank].sizes());
    EXPECT_EQ(layout.cut().begin(rank), chunks[rank].storage_offset());
  }
}

TEST(ParamLayout, TrailingRanksMayHoldNothing) {
  const ParamLayout layout({5}, {1}, 0, 4); // chunks of two
  EXPECT_EQ(layout.cut().length(2), 1);
  EXPECT_EQ(layout.cut().length(3), 0);
  EXPECT_EQ(layout.shard_sizes(3), (std::vector<int64_t>{0}));
}

TEST(ParamLayout, AZeroDimensionalParameterBelongsToRankZero) {
  const ParamLayout layout({}, {}, 0, 3);
  EXPECT_EQ(layout.shard_sizes(0), (std::vector<int64_t>{}));
  EXPECT_EQ(layout.shard_sizes(1), (std::vector<int64_t>{0}));
  EXPECT_EQ(layout.cut().length(0), 1);
  EXPECT_EQ(layout.cut().length(2), 0);
}

TEST(ParamLayout, LengthsAddUpAndFollowOneAnother) {
  for (const auto& shape : shapes()) {
    for (int64_t dim = 0; dim < std::max<int64_t>(1, shape.sizes.size()); ++dim) {
      for (int ranks : {1, 2, 3, 4, 7}) {
        const ParamLayout layout(shape.sizes, counted(shape).strides().vec(), dim, ranks);
        int64_t next = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          EXPECT_EQ(layout.cut().begin(rank), next);
          EXPECT_EQ(layout.cut().length(rank), c10::multiply_integers(layout.shard_sizes(rank)));
          next += layout.cut().length(rank);
        }
        EXPECT_EQ(next, layout.numel());
      }
    }
  }
}

TEST(ParamLayout, PackAndUnpackAreInverse) {
  for (const auto& shape : shapes()) {
    for (int64_t dim = 0; dim < static_cast<int64_t>(shape.sizes.size()); ++dim) {
      for (int ranks : {1, 2, 3, 4}) {
        const auto whole = counted(shape);
        const ParamLayout layout(shape.sizes, whole.strides().vec(), dim, ranks);
        const auto slices = layout.in_place() ? whole.as_strided({whole.numel()}, {1}) : layout.pack(whole);
        const auto back = layout.unpack(slices);
        EXPECT_TRUE(at::equal(back, whole));
        EXPECT_EQ(back.strides(), whole.strides());
        if (layout.in_place() && ranks > 1) {
          // The slices are the memory itself.
          const auto shard = layout.shard_sizes(0);
          EXPECT_TRUE(at::equal(
              whole.as_strided({layout.cut().length(0)}, {1}),
              whole.narrow(dim, 0, shard[dim]).as_strided({layout.cut().length(0)}, {1})));
        }
      }
    }
  }
}

TEST(ParamLayout, RanksDoNotAddOperators) {
  for (const int ranks : {2, 3, 100}) {
    const ParamLayout layout({3, 101}, {101, 1}, 1, ranks);
    const at::Tensor whole = at::empty({3, 101});
    at::Tensor slices;
    EXPECT_LE(testing::count_operators([&] { slices = layout.pack(whole); }), 3) << "the memory and two copies";
    EXPECT_LE(testing::count_operators([&] { layout.unpack(slices); }), 3) << "likewise";
  }
}

TEST(ParamLayout, ShardsOfAnInnerDimensionAreThoseOfTorchChunk) {
  const Shape shape{{2, 7, 3}, {}};
  const auto whole = counted(shape);
  const auto chunks = whole.chunk(3, 1);
  const ParamLayout layout(shape.sizes, whole.strides().vec(), 1, 3);
  const auto slices = layout.pack(whole);
  for (int rank = 0; rank < 3; ++rank) {
    const auto shard =
        slices.narrow(0, layout.cut().begin(rank), layout.cut().length(rank)).view(layout.shard_sizes(rank));
    EXPECT_TRUE(at::equal(shard, chunks[rank]));
  }
}

TEST(ParamLayout, RowsThatLieTogetherNeedNoCopy) {
  EXPECT_TRUE(ParamLayout({4, 3}, {3, 1}, 0, 2).in_place());
  EXPECT_FALSE(ParamLayout({4, 3}, {3, 1}, 1, 2).in_place());
  EXPECT_FALSE(ParamLayout({4, 3}, {1, 4}, 0, 2).in_place()); // transposed
  EXPECT_TRUE(ParamLayout({4, 2, 3, 3}, {18, 1, 6, 2}, 0, 2).in_place()); // channels last
  EXPECT_TRUE(ParamLayout({4, 3}, {1, 4}, 0, 1).in_place());
}

TEST(IsDense, TellsPermutationsFromGapsAndOverlaps) {
  EXPECT_TRUE(is_dense({4, 3}, {1, 4}));
  EXPECT_TRUE(is_dense({4, 1, 3}, {3, 99, 1}));
  EXPECT_FALSE(is_dense({4, 3}, {6, 1}));
  EXPECT_FALSE(is_dense({4, 3}, {0, 1}));
}

} // namespace
} // namespace fsdp::layout
