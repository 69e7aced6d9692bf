#include "base/log.h"

#include <thread>

#include <gtest/gtest.h>

namespace fsdp {
namespace {

class Log : public testing::Test {
 protected:
  void SetUp() override {
    log::set_level(log::Level::kWarn);
  }
  void TearDown() override {
    log::set_rank(-1);
    log::set_level(log::Level::kWarn);
  }

  template <typename Body>
  std::string written_by(Body body) {
    testing::internal::CaptureStderr();
    body();
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(Log, WritesOnlyWhatTheLevelAsksFor) {
  EXPECT_EQ(written_by([] { log::info("quiet"); }), "");
  EXPECT_EQ(written_by([] { log::warn("slow by {} times", 3); }), "[libfsdp] warning: slow by 3 times\n");
  log::set_level(log::Level::kDebug);
  EXPECT_EQ(written_by([] { log::debug("detail"); }), "[libfsdp] debug: detail\n");
  log::set_level(log::Level::kError);
  EXPECT_EQ(written_by([] { log::warn("quiet"); }), "");
}

TEST_F(Log, NamesTheRankOfTheThreadBeforeThatOfTheProcess) {
  log::set_rank(2);
  EXPECT_EQ(written_by([] { log::error("x"); }), "[libfsdp rank 2] error: x\n");
  std::string of_thread = written_by([] {
    std::thread([] {
      log::set_thread_rank(5);
      log::error("x");
    }).join();
  });
  EXPECT_EQ(of_thread, "[libfsdp rank 5] error: x\n");
  EXPECT_EQ(written_by([] { log::error("x"); }), "[libfsdp rank 2] error: x\n");
}

TEST_F(Log, WarnOnceWritesATextOnce) {
  auto warn_twice = [] {
    log::warn_once("only once");
    log::warn_once("only once");
    log::warn_once("another");
  };
  EXPECT_EQ(written_by(warn_twice), "[libfsdp] warning: only once\n[libfsdp] warning: another\n");
}

} // namespace
} // namespace fsdp
