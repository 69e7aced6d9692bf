// Extents beside what cutting element by element gives.

#include <fsdp/extent.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full_like.h>
#include <gtest/gtest.h>

#include "layout/elements.h"
#include "layout/param_layout.h"

namespace fsdp::layout {
namespace {

using Elements = std::vector<int64_t>; // places in the whole's memory

/// A whole tensor, its dimensions in whatever order in memory.
struct Whole {
  std::vector<int64_t> sizes, strides;
};

class Draw {
 public:
  explicit Draw(unsigned seed) : engine_(seed) {}

  int64_t number(int64_t first, int64_t last) {
    return std::uniform_int_distribution<int64_t>(first, last)(engine_);
  }

  std::vector<int64_t> sizes() {
    std::vector<int64_t> sizes(number(0, 4));
    for (auto& size : sizes) {
      size = number(number(0, 9) == 0 ? 0 : 1, 7);
    }
    return sizes;
  }

  Whole in_some_order(const std::vector<int64_t>& sizes) {
    std::vector<size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), engine_);
    Whole whole{sizes, std::vector<int64_t>(sizes.size())};
    int64_t next = 1;
    for (const size_t dim : order) { // innermost first
      whole.strides[dim] = next;
      next *= std::max<int64_t>(sizes[dim], 1);
    }
    return whole;
  }

 private:
  std::mt19937 engine_;
};

Elements elements_of(const Extent& extent) {
  Elements elements;
  for (int64_t run = 0; run < extent.count; ++run) {
    for (int64_t i = 0; i < extent.run; ++i) {
      elements.push_back(extent.first + run * extent.stride + i);
    }
  }
  return elements;
}

// The elements whose coordinate in `dim` lies in [first, last), in the order of memory.
Elements rows_by_coordinates(const Whole& whole, int64_t dim, int64_t first, int64_t last) {
  Elements elements;
  std::vector<int64_t> at(whole.sizes.size());
  const int64_t numel = c10::multiply_integers(whole.sizes);
  for (int64_t n = 0; n < numel; ++n) {
    int64_t place = 0, rest = n;
    for (size_t d = whole.sizes.size(); d-- > 0;) {
      at[d] = rest % whole.sizes[d];
      rest /= whole.sizes[d];
      place += at[d] * whole.strides[d];
    }
    const int64_t row = at.empty() ? 0 : at[dim];
    if (row >= first && row < last) {
      elements.push_back(place);
    }
  }
  std::sort(elements.begin(), elements.end());
  return elements;
}

at::Tensor places_in(const Whole& whole) {
  auto tensor = at::empty_strided(whole.sizes, whole.strides, at::kLong);
  tensor.as_strided({tensor.numel()}, {1}).copy_(at::arange(tensor.numel(), at::kLong));
  return tensor;
}

// As a parameter's shard is cut: where it lies, or packed.
at::Tensor shard_of(const ParamLayout& layout, const at::Tensor& whole, int rank) {
  const at::Tensor slices = layout.in_place() ? whole : layout.pack(whole);
  return slices.as_strided(
      layout.shard_sizes(rank), layout.shard_strides(rank), slices.storage_offset() + layout.cut().begin(rank));
}

Elements values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.reshape({-1}).contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

/// One parameter, cut in whatever way.
struct Drawn {
  Whole whole;
  ParamLayout layout;
  int ranks;
};

Drawn draw_cut(Draw& draw, const Whole& whole) {
  const int ranks = static_cast<int>(draw.number(1, 6));
  const int64_t numel = c10::multiply_integers(whole.sizes);
  if (draw.number(0, 2) == 0) {
    const auto cuts = flat_cuts({draw.number(0, 9), numel, draw.number(0, 9)}, ranks, draw.number(1, 4));
    return {whole, ParamLayout(whole.sizes, whole.strides, cuts[1], ranks), ranks};
  }
  const int64_t dim = whole.sizes.empty() ? 0 : draw.number(0, static_cast<int64_t>(whole.sizes.size()) - 1);
  return {whole, ParamLayout(whole.sizes, whole.strides, dim, ranks), ranks};
}

Drawn draw_cut(Draw& draw) {
  return draw_cut(draw, draw.in_some_order(draw.sizes()));
}

// Place among the elements that there are -> among those that are wanted, element by element.
std::map<int64_t, int64_t> shared(const Elements& have, const Elements& want) {
  std::map<int64_t, int64_t> wanted_at, pairs;
  for (size_t i = 0; i < want.size(); ++i) {
    wanted_at[want[i]] = static_cast<int64_t>(i);
  }
  for (size_t i = 0; i < have.size(); ++i) {
    if (const auto found = wanted_at.find(have[i]); found != wanted_at.end()) {
      pairs[static_cast<int64_t>(i)] = found->second;
    }
  }
  return pairs;
}

void expect_overlap(const Extent& have, const Extent& want) {
  std::map<int64_t, int64_t> pairs;
  const OverlapRun* before = nullptr;
  const auto runs = overlap(have, want);
  for (const auto& run : runs) {
    EXPECT_GT(run.length, 0);
    if (before != nullptr) {
      const bool goes_on = before->from + before->length == run.from && before->to + before->length == run.to;
      EXPECT_FALSE(goes_on) << "two runs could be one";
    }
    for (int64_t i = 0; i < run.length; ++i) {
      pairs[run.from + i] = run.to + i;
    }
    before = &run;
  }
  EXPECT_EQ(pairs, shared(elements_of(have), elements_of(want)));
}

TEST(Extents, AreTheElementsThatRowsHave) {
  Draw draw(1);
  for (int trial = 0; trial < 3000; ++trial) {
    const Whole whole = draw.in_some_order(draw.sizes());
    const int64_t dims = static_cast<int64_t>(whole.sizes.size());
    const int64_t dim = dims == 0 ? 0 : draw.number(0, dims - 1), size = dims == 0 ? 1 : whole.sizes[dim];
    const int64_t first = draw.number(0, size), rows = draw.number(0, size - first);
    const Extent extent = Extent::of_rows(whole.sizes, whole.strides, dim, first, rows);
    const Elements wanted = rows_by_coordinates(whole, dim, first, first + rows);
    ASSERT_EQ(elements_of(extent), wanted);
    ASSERT_EQ(extent.numel(), static_cast<int64_t>(wanted.size()));
  }
}

TEST(Extents, OfEqualElementsAreEqual) {
  Draw draw(2);
  std::map<Elements, Extent> known;
  for (int trial = 0; trial < 3000; ++trial) {
    const Drawn drawn = draw_cut(draw);
    for (int rank = 0; rank < drawn.ranks; ++rank) {
      const Extent extent = drawn.layout.extent(rank);
      const auto [place, is_new] = known.emplace(elements_of(extent), extent);
      ASSERT_TRUE(extent == place->second) << extent.first << " " << extent.run << " " << extent.stride;
    }
  }
}

TEST(Extents, AreWhatShardsHave) {
  Draw draw(3);
  for (int trial = 0; trial < 2000; ++trial) {
    const Drawn drawn = draw_cut(draw);
    const at::Tensor places = places_in(drawn.whole);
    Elements all;
    for (int rank = 0; rank < drawn.ranks; ++rank) {
      const Extent extent = drawn.layout.extent(rank);
      const at::Tensor shard = shard_of(drawn.layout, places, rank);
      const Elements wanted = elements_of(extent);
      ASSERT_EQ(values(in_memory_order({drawn.whole.sizes, drawn.whole.strides, extent, shard})), wanted);
      all.insert(all.end(), wanted.begin(), wanted.end());
    }
    std::sort(all.begin(), all.end());
    ASSERT_EQ(all, values(places.as_strided({places.numel()}, {1}))) << "each element once";
  }
}

TEST(Extents, OverlapAsTheirElementsDo) {
  Draw draw(4);
  for (int trial = 0; trial < 1000; ++trial) {
    const Whole whole = draw.in_some_order(draw.sizes());
    const Drawn a = draw_cut(draw, whole), b = draw_cut(draw, whole);
    for (int mine = 0; mine < a.ranks; ++mine) {
      for (int other = 0; other < b.ranks; ++other) {
        expect_overlap(a.layout.extent(mine), b.layout.extent(other));
      }
    }
    ASSERT_FALSE(::testing::Test::HasFailure()) << "trial " << trial;
  }
}

TEST(Extents, OfAnyRegularRunsOverlapAsTheirElementsDo) {
  Draw draw(5);
  const auto any = [&] {
    const int64_t run = draw.number(1, 6), count = draw.number(1, 12);
    return Extent{draw.number(0, 20), run, run + draw.number(0, 9), count};
  };
  for (int trial = 0; trial < 3000; ++trial) {
    expect_overlap(any(), any());
    ASSERT_FALSE(::testing::Test::HasFailure()) << "trial " << trial;
  }
}

TEST(Extents, OverlapInTimeThatGoesWithTheRunsThatMeet) {
  const Extent many{0, 1, 2, int64_t{1} << 40}, far{int64_t{1} << 40, 4, 4, 1};
  const std::vector<OverlapRun> wanted{{int64_t{1} << 39, 0, 1}, {(int64_t{1} << 39) + 1, 2, 1}};
  EXPECT_EQ(overlap(many, far), wanted);
}

// From any cut into any other, as files that were saved by other ranks will be read.
TEST(Elements, GoFromAnyPiecesIntoAnyOthers) {
  Draw draw(6);
  for (int trial = 0; trial < 1000; ++trial) {
    const Whole whole = draw.in_some_order(draw.sizes());
    const Drawn from = draw_cut(draw, whole), to = draw_cut(draw, whole);
    const at::Tensor places = places_in(whole);
    for (int wanting = 0; wanting < to.ranks; ++wanting) {
      const Extent extent = to.layout.extent(wanting);
      const at::Tensor wanted = shard_of(to.layout, places, wanting);
      at::Tensor got = at::full_like(wanted, -1);
      int64_t covering = 0;
      for (int having = 0; having < from.ranks; ++having) {
        const Extent there = from.layout.extent(having);
        const PieceOfWhole have{whole.sizes, whole.strides, there, shard_of(from.layout, places, having)};
        const PieceOfWhole want{whole.sizes, whole.strides, extent, got};
        covering += covers(have, want) ? 1 : 0;
        got = taken_from(have, want);
      }
      ASSERT_TRUE(got.equal(wanted));
      ASSERT_EQ(got.sizes(), wanted.sizes());
      const bool by_one = extent.numel() == 0 || covering == 1;
      ASSERT_TRUE(by_one || covering == 0);
      ASSERT_TRUE(by_one || from.ranks > 1);
    }
  }
}

TEST(Elements, OfWholesGoIntoPiecesOfAnotherMemoryOrder) {
  Draw draw(7);
  for (int trial = 0; trial < 1000; ++trial) {
    const auto sizes = draw.sizes();
    const Whole there = draw.in_some_order(sizes), here = draw.in_some_order(sizes);
    const Extent all = Extent::one_run(0, c10::multiply_integers(sizes));
    const Drawn to = draw_cut(draw, here);
    const at::Tensor values_there = places_in(there);
    const at::Tensor values_here = at::empty_strided(here.sizes, here.strides, at::kLong).copy_(values_there);
    for (int rank = 0; rank < to.ranks; ++rank) {
      const Extent extent = to.layout.extent(rank);
      const at::Tensor wanted = shard_of(to.layout, values_here, rank);
      const PieceOfWhole have{there.sizes, there.strides, all, values_there};
      const PieceOfWhole want{here.sizes, here.strides, extent, at::full_like(wanted, -1)};
      ASSERT_TRUE(covers(have, want));
      ASSERT_TRUE(taken_from(have, want).equal(wanted));
    }
  }
}

} // namespace
} // namespace fsdp::layout
