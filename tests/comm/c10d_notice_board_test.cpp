#include "comm/c10d/notice_board.h"

#include <chrono>
#include <thread>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "support/error_message.h"

namespace fsdp::testing {
namespace {

using adapter::NoticeBoard;

struct TwoBoards : ::testing::Test {
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  NoticeBoard mine{store, 0, 2};
  NoticeBoard other{store, 1, 2};
};

template <typename Condition>
bool becomes_true(Condition condition) {
  for (int i = 0; i < 12'000 && !condition(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return condition();
}

TEST_F(TwoBoards, AReasonIsHeard) {
  mine.wait_at({1, "unshard of 'a'"});
  EXPECT_EQ(mine.heard(), std::nullopt);
  other.announce("the data ran out");
  ASSERT_TRUE(becomes_true([&] { return mine.heard().has_value(); }));
  EXPECT_EQ(*mine.heard(), "rank 1 gave up: the data ran out");
}

TEST_F(TwoBoards, TheFirstReasonCounts) {
  other.announce("first");
  other.announce("second");
  mine.announce("third");
  EXPECT_EQ(mine.ask({1, "barrier"}), "rank 1 gave up: first");
}

TEST_F(TwoBoards, TellsWhereTheOthersAre) {
  EXPECT_EQ(mine.ask({5, "unshard of 'a'"}), "rank 1 has not been seen at it");
  other.wait_at({5, "unshard of 'b'"});
  EXPECT_TRUE(becomes_true([&] { return mine.ask({5, "unshard of 'a'"}) == "rank 1 is in unshard of 'b'"; }));
  EXPECT_EQ(mine.ask({6, "unshard of 'a'"}), "rank 1 has not been seen at it");
  EXPECT_EQ(mine.ask({5, "unshard of 'b'"}), "");
}

// Else each of many ranks would ask about each, all at once.
TEST_F(TwoBoards, OfThoseThatGiveUpTogetherOneAsksForAll) {
  EXPECT_EQ(mine.ask({5, "unshard of 'a'"}), "rank 1 has not been seen at it");
  EXPECT_EQ(other.ask({5, "unshard of 'a'"}), "") << "it waits for the first one's word, for a moment";
  mine.announce("it took longer than 60 s; rank 1 has not been seen at it");
  EXPECT_EQ(
      other.ask({5, "unshard of 'a'"}), "rank 0 gave up: it took longer than 60 s; rank 1 has not been seen at it");
}

TEST_F(TwoBoards, AWaitThatIsOverIsNotListenedFor) {
  mine.wait_at({1, "barrier"});
  mine.stop_listening();
  other.announce("too late");
  EXPECT_EQ(mine.heard(), std::nullopt);
  mine.wait_at({2, "barrier"});
  EXPECT_TRUE(becomes_true([&] { return mine.heard().has_value(); }));
}

TEST(NoticeBoard, WithoutAStoreThereIsNothingToHear) {
  NoticeBoard board(nullptr, 0, 2);
  board.announce("nobody reads this");
  board.wait_at({1, "barrier"});
  EXPECT_EQ(board.heard(), std::nullopt);
  EXPECT_EQ(board.ask({1, "barrier"}), "");
}

} // namespace
} // namespace fsdp::testing
