// Memory for copies that are written later.

#include <gtest/gtest.h>
#include <torch/types.h>

#include "checkpoint/staging_memory.h"

namespace fsdp::testing {
namespace {

using disk::StagingMemory;

TEST(StagingMemoryForCopies, IsTheSameTheNextTime) {
  const auto values = torch::arange(1000);
  const void* first = nullptr;
  {
    StagingMemory memory(1 << 20, /*keep=*/true);
    first = memory.place_for(values).const_data_ptr();
  }
  StagingMemory again(1 << 19, /*keep=*/true);
  EXPECT_EQ(again.place_for(values).const_data_ptr(), first);
  StagingMemory beside(1 << 19, /*keep=*/true);
  EXPECT_NE(beside.place_for(values).const_data_ptr(), first) << "one at a time";
}

TEST(StagingMemoryForCopies, HasPlacesSideBySide) {
  const auto values = torch::arange(10), flags = torch::tensor({true, false, true});
  StagingMemory memory(StagingMemory::taken_by(80) + StagingMemory::taken_by(3) + StagingMemory::taken_by(20), false);
  const auto first = memory.place_for(values).copy_(values), second = memory.place_for(flags).copy_(flags);
  const auto strided = values.to(torch::kShort).expand({1, 10}).t().select(1, 0);
  const auto third = memory.place_for(strided).copy_(strided);
  EXPECT_TRUE(first.equal(values));
  EXPECT_TRUE(second.equal(flags));
  EXPECT_TRUE(third.equal(values.to(torch::kShort)));
  for (const auto& copy : {first, second, third}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(copy.const_data_ptr()) % 64, 0U);
  }
  EXPECT_THROW(memory.place_for(flags), std::exception) << "more than there is";
}

} // namespace
} // namespace fsdp::testing
