#include "layout/flat_layout.h"

#include <gtest/gtest.h>

namespace fsdp::layout {
namespace {

TEST(FlatLayout, EveryRankGetsTheSameNumberOfElements) {
  const FlatLayout layout({5, 3, 2}, 4);
  EXPECT_EQ(layout.chunk(), 3);
  EXPECT_EQ(layout.numel(), 12);
  EXPECT_EQ(layout.padding(), 2);
  EXPECT_EQ(layout.offset(2), 8);
}

TEST(FlatLayout, ShareBoundariesCutParametersAnywhere) {
  const FlatLayout layout({5, 3, 2}, 4);
  EXPECT_EQ(layout.within_parameter(0, 1).begin, 3);
  EXPECT_EQ(layout.within_parameter(0, 1).length, 2);
  EXPECT_EQ(layout.within_share(0, 1).begin, 0);
  EXPECT_EQ(layout.within_parameter(1, 1).begin, 0);
  EXPECT_EQ(layout.within_parameter(1, 1).length, 1);
  EXPECT_EQ(layout.within_share(1, 1).begin, 2);
  EXPECT_EQ(layout.within_parameter(2, 0).length, 0);
}

TEST(FlatLayout, TheRanksPartsOfAParameterAddUp) {
  const std::vector<int64_t> numels{1, 0, 13, 4, 1};
  for (int ranks : {1, 2, 3, 5, 8, 40}) {
    const FlatLayout layout(numels, ranks);
    for (size_t parameter = 0; parameter < numels.size(); ++parameter) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const Range part = layout.within_parameter(parameter, rank);
        if (part.length > 0) {
          EXPECT_EQ(part.begin, next);
          const Range share = layout.within_share(parameter, rank);
          EXPECT_EQ(layout.chunk() * rank + share.begin, layout.offset(parameter) + part.begin);
        }
        next += part.length;
      }
      EXPECT_EQ(next, numels[parameter]);
    }
  }
}

} // namespace
} // namespace fsdp::layout
