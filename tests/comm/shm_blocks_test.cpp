#include "comm/shm/blocks.h"

#include <map>
#include <random>

#include <gtest/gtest.h>

namespace fsdp::shm {
namespace {

constexpr size_t kMebibyte = size_t{1} << 20;

TEST(Blocks, NeverOverlapAndWasteLittle) {
  Blocks blocks(1024 * kMebibyte);
  std::map<size_t, size_t> taken; // offset -> bytes
  std::mt19937_64 random(7);
  for (int i = 0; i < 20'000; ++i) {
    if (taken.size() > 100 || (!taken.empty() && random() % 2)) {
      const auto victim = std::next(taken.begin(), static_cast<long>(random() % taken.size()));
      EXPECT_EQ(blocks.give_back(victim->first), victim->second);
      taken.erase(victim);
      continue;
    }
    const size_t bytes = (size_t{128} << 10) + random() % kMebibyte;
    const auto block = blocks.take(bytes);
    ASSERT_GE(block.bytes, bytes);
    EXPECT_LE(block.bytes, bytes + bytes / 8);
    EXPECT_EQ(block.offset % 4096, 0u);
    const auto after = taken.lower_bound(block.offset);
    EXPECT_TRUE(after == taken.end() || block.offset + block.bytes <= after->first);
    EXPECT_TRUE(after == taken.begin() || std::prev(after)->first + std::prev(after)->second <= block.offset);
    taken[block.offset] = block.bytes;
  }
}

TEST(Blocks, FreedNeighboursBecomeOne) {
  Blocks blocks(16 * kMebibyte);
  std::vector<size_t> offsets;
  for (int i = 0; i < 16; ++i) {
    offsets.push_back(blocks.take(kMebibyte).offset);
  }
  EXPECT_EQ(blocks.take(kMebibyte).bytes, 0u) << "it is full";
  std::shuffle(offsets.begin(), offsets.end(), std::mt19937(3));
  for (const size_t offset : offsets) {
    blocks.give_back(offset);
  }
  EXPECT_EQ(blocks.bytes_in_use(), 0u);
  EXPECT_EQ(blocks.take(16 * kMebibyte).bytes, 16 * kMebibyte);
}

TEST(Blocks, TheSameSizeGetsTheSameBlockAgain) {
  Blocks blocks(64 * kMebibyte);
  const auto first = blocks.take(5 * kMebibyte);
  const auto second = blocks.take(3 * kMebibyte);
  blocks.give_back(first.offset);
  blocks.give_back(second.offset);
  EXPECT_EQ(blocks.take(5 * kMebibyte).offset, first.offset);
  EXPECT_EQ(blocks.take(3 * kMebibyte).offset, second.offset);
}

TEST(Blocks, TheLastFreeBlockGrows) {
  Blocks blocks(8 * kMebibyte);
  blocks.take(2 * kMebibyte);
  const auto last = blocks.take(2 * kMebibyte);
  blocks.give_back(last.offset, 7);
  const auto bigger = blocks.take(6 * kMebibyte);
  EXPECT_EQ(bigger.offset, last.offset) << "and the rest was never used";
  EXPECT_EQ(bigger.stamp, 7u);
  EXPECT_EQ(blocks.take(kMebibyte).bytes, 0u) << "it is full";
}

TEST(Blocks, StampsTellTheNewestUseOfAnyPart) {
  Blocks blocks(64 * kMebibyte);
  const size_t first = blocks.take(kMebibyte).offset;
  const size_t second = blocks.take(kMebibyte).offset;
  EXPECT_EQ(blocks.take(kMebibyte).stamp, 0u);
  blocks.give_back(first, 1);
  blocks.give_back(second, 2);
  EXPECT_EQ(blocks.take(2 * kMebibyte).stamp, 2u);
}

TEST(Blocks, DroppingForgetsTheUnusedEnd) {
  Blocks blocks(64 * kMebibyte);
  const size_t low = blocks.take(kMebibyte).offset;
  const size_t high = blocks.take(2 * kMebibyte).offset;
  blocks.give_back(high, 5);
  size_t dropped = 0;
  blocks.drop_free([&](size_t, size_t bytes) { dropped += bytes; });
  EXPECT_EQ(dropped, 2 * kMebibyte);
  EXPECT_EQ(blocks.take(4 * kMebibyte).stamp, 0u) << "never used memory again";
  EXPECT_EQ(blocks.give_back(low), kMebibyte);
}

} // namespace
} // namespace fsdp::shm
