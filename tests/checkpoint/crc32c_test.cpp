#include "checkpoint/crc32c.h"

#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace fsdp::disk {
namespace {

TEST(Crc32c, IsTheOneOfTheStandard) { // RFC 3720, B.4
  EXPECT_EQ(crc32c("123456789", 9), 0xe3069283);
  EXPECT_EQ(crc32c(std::string(32, '\0').data(), 32), 0x8a9136aa);
  EXPECT_EQ(crc32c(std::string(32, '\xff').data(), 32), 0x62a8ab43);
  EXPECT_EQ(crc32c("", 0), 0u);
}

std::vector<size_t> lengths() { // long ones are taken in stripes, three at a time
  std::vector<size_t> lengths{3 * 4096 - 1, 3 * 4096, 3 * 4096 + 9, 3 * 4096 * 5 + 4099, 100000};
  for (size_t length = 0; length < 100; ++length) {
    lengths.push_back(length);
  }
  return lengths;
}

TEST(Crc32c, IsTheSameByInstructionAndByTableAndPieceByPiece) {
  std::mt19937 random(1); // NOLINT: the same each time
  for (const size_t length : lengths()) {
    SCOPED_TRACE(length);
    std::string text(length, '\0');
    for (char& letter : text) {
      letter = static_cast<char>(random());
    }
    const uint32_t whole = crc32c(text.data(), length);
    EXPECT_EQ(crc32c_by_table(text.data(), length), whole);
    const size_t first = length / 3;
    const uint32_t begin = crc32c(text.data(), first);
    EXPECT_EQ(crc32c(text.data() + first, length - first, begin), whole);
    EXPECT_EQ(crc32c_by_table(text.data() + first, length - first, begin), whole);
  }
}

} // namespace
} // namespace fsdp::disk
