#include "base/format.h"

#include <vector>

#include <gtest/gtest.h>

namespace fsdp {
namespace {

TEST(Format, HumanBytesPicksTheUnit) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.0 KiB");
  EXPECT_EQ(human_bytes(12'897'485), "12.3 MiB");
  EXPECT_EQ(human_bytes(int64_t{4} << 30), "4.0 GiB");
  EXPECT_EQ(human_bytes(-2048), "-2.0 KiB");
}

TEST(Format, HumanBytesRoundsUpIntoTheNextUnit) {
  EXPECT_EQ(human_bytes((1 << 20) - 1), "1.0 MiB");
}

TEST(Format, JoinPutsSeparatorsBetween) {
  EXPECT_EQ(join(std::vector<int>{}), "");
  EXPECT_EQ(join(std::vector<int>{7}), "7");
  EXPECT_EQ(join(std::vector<std::string>{"replicate", "shard"}, " x "), "replicate x shard");
}

} // namespace
} // namespace fsdp
