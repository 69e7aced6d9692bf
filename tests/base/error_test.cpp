#include <gtest/gtest.h>

#include <fsdp/error.h>

#include "base/check.h"

namespace fsdp {
namespace {

TEST(Error, CheckThrowsItsPartsAsOneMessage) {
  try {
    FSDP_CHECK(1 + 1 == 3, "[sum] expected {}, but got {}. Count again.", 3, 2);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "[sum] expected 3, but got 2. Count again.");
  }
}

TEST(Error, CheckThatHoldsDoesNotBuildTheMessage) {
  int built = 0;
  FSDP_CHECK(1 + 1 == 2, "[sum] {}", ++built);
  EXPECT_EQ(built, 0);
}

TEST(Error, CommErrorIsAnError) {
  EXPECT_THROW(throw CommError("[barrier] rank 1 died"), Error);
}

} // namespace
} // namespace fsdp
