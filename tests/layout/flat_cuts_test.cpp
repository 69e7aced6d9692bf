#include "layout/param_layout.h"

#include <gtest/gtest.h>

namespace fsdp::layout {
namespace {

TEST(FlatCuts, EveryRankGetsTheSameNumberOfElements) {
  const auto cuts = flat_cuts({5, 3, 2}, 4);
  for (const Cut& cut : cuts) {
    EXPECT_EQ(cut.chunk, 3); // 10 elements and 2 of padding
  }
  EXPECT_EQ(cuts[2].before, 8);
}

TEST(FlatCuts, ShareBoundariesCutParametersAnywhere) {
  const auto cuts = flat_cuts({5, 3, 2}, 4);
  EXPECT_EQ(cuts[0].begin(1), 3);
  EXPECT_EQ(cuts[0].length(1), 2);
  EXPECT_EQ(cuts[0].offset(1), 0);
  EXPECT_EQ(cuts[1].begin(1), 0);
  EXPECT_EQ(cuts[1].length(1), 1);
  EXPECT_EQ(cuts[1].offset(1), 2);
  EXPECT_EQ(cuts[2].length(0), 0);
}

TEST(FlatCuts, ParametersBeginWhereTheyAreAligned) {
  const auto cuts = flat_cuts({35, 7}, 2, /*alignment=*/4);
  EXPECT_EQ(cuts[1].before, 36);
  EXPECT_EQ(cuts[0].chunk, 22); // 43 elements on 2 ranks
  EXPECT_EQ(cuts[0].length(0), 22);
  EXPECT_EQ(cuts[0].length(1), 13);
  EXPECT_EQ(cuts[1].offset(1), 14);
}

TEST(FlatCuts, TheRanksPartsOfAParameterAddUp) {
  const std::vector<int64_t> numels{1, 0, 13, 4, 1};
  for (const int64_t alignment : {1, 4, 8}) {
    for (const int ranks : {1, 2, 3, 5, 8, 40}) {
      const auto cuts = flat_cuts(numels, ranks, alignment);
      for (size_t parameter = 0; parameter < numels.size(); ++parameter) {
        const Cut cut = cuts[parameter];
        EXPECT_EQ(cut.before % alignment, 0);
        int64_t next = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          if (cut.length(rank) > 0) {
            EXPECT_EQ(cut.begin(rank), next);
            EXPECT_EQ(cut.chunk * rank + cut.offset(rank), cut.before + cut.begin(rank));
            EXPECT_LE(cut.offset(rank) + cut.length(rank), cut.chunk);
          }
          next += cut.length(rank);
        }
        EXPECT_EQ(next, numels[parameter]);
      }
    }
  }
}

} // namespace
} // namespace fsdp::layout
