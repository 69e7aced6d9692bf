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
    first = memory.copy_of(values).const_data_ptr();
  }
  StagingMemory again(1 << 19, /*keep=*/true);
  EXPECT_EQ(again.copy_of(values).const_data_ptr(), first);
  StagingMemory beside(1 << 19, /*keep=*/true);
  EXPECT_NE(beside.copy_of(values).const_data_ptr(), first) << "one at a time";
}

TEST(StagingMemoryForCopies, HasCopiesSideBySide) {
  const auto values = torch::arange(10), flags = torch::tensor({true, false, true});
  StagingMemory memory(StagingMemory::taken_by(80) + StagingMemory::taken_by(3) + StagingMemory::taken_by(20), false);
  auto given = values.clone();
  const auto first = memory.copy_of(given), second = memory.copy_of(flags);
  const auto third = memory.copy_of(values.to(torch::kShort).expand({1, 10}).t().select(1, 0));
  given.fill_(-1);
  EXPECT_TRUE(first.equal(values));
  EXPECT_TRUE(second.equal(flags));
  EXPECT_TRUE(third.equal(values.to(torch::kShort)));
  for (const auto& copy : {first, second, third}) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(copy.const_data_ptr()) % 64, 0U);
  }
  EXPECT_THROW(memory.copy_of(flags), std::exception) << "more than there is";
}

} // namespace
} // namespace fsdp::testing
