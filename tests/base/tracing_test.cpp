#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <fsdp/error.h>
#include <fsdp/trace.h>

#include "base/log.h"
#include "base/tracing.h"
#include "support/remove_folder.h"

namespace fsdp {
namespace {

using Json = nlohmann::json;

const std::string kNoUnit, kUnit = "blocks.0";

class Tracing : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(::testing::TempDir()) / ("tracing" + std::to_string(getpid()));
    std::filesystem::create_directories(folder_);
    log::set_thread_rank(3);
  }
  void TearDown() override {
    log::set_thread_rank(-1);
    fsdp::testing::remove_folder(folder_);
  }

  std::string asked_for() const {
    return folder_ / "a.trace.json";
  }
  Json written() const {
    std::ifstream file(folder_ / "a.trace.rank3.json");
    return Json::parse(file);
  }
  std::vector<Json> spans() const {
    std::vector<Json> found;
    for (const Json& event : written()) {
      if (event.at("ph") == "X") {
        found.push_back(event);
      }
    }
    return found;
  }

  std::filesystem::path folder_;
};

TEST_F(Tracing, NothingIsRecordedWithoutBeingAsked) {
  { const tracing::Span span("gather", kUnit); }
  EXPECT_FALSE(tracing::on());
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(Tracing, SpansSayWhatWhoseWhenAndWhoWasWaitedFor) {
  {
    const auto recording = trace(asked_for());
    const tracing::Span outer("touch", kUnit);
    const tracing::Span inner("wait for rank", kUnit, 2);
  }
  const auto both = spans();
  ASSERT_EQ(both.size(), 2u);
  const Json &inner = both[0], &outer = both[1]; // in the order in which they end
  EXPECT_EQ(inner.at("name"), "wait for rank");
  EXPECT_EQ(inner.at("args"), (Json{{"unit", "blocks.0"}, {"peer", 2}}));
  EXPECT_EQ(outer.at("args"), (Json{{"unit", "blocks.0"}}));
  EXPECT_EQ(outer.at("pid"), 3);
  EXPECT_EQ(outer.at("tid"), inner.at("tid"));
  const double begin = outer.at("ts"), end = begin + outer.at("dur").get<double>();
  EXPECT_LE(begin, inner.at("ts").get<double>());
  EXPECT_GE(end, inner.at("ts").get<double>() + inner.at("dur").get<double>());
}

TEST_F(Tracing, ThreadsHaveNumbersOfTheirOwn) {
  {
    const auto recording = trace(asked_for());
    { const tracing::Span span("here", kNoUnit); }
    std::thread([] { const tracing::Span span("there", kNoUnit); }).join();
  }
  const auto both = spans();
  ASSERT_EQ(both.size(), 2u);
  EXPECT_NE(both[0].at("tid"), both[1].at("tid"));
}

TEST_F(Tracing, MemoryIsACounter) {
  {
    const auto recording = trace(asked_for());
    tracing::record_memory({.whole = 10, .gradients = 20, .bound = 40});
  }
  const Json counter = written().back();
  EXPECT_EQ(counter.at("ph"), "C");
  EXPECT_EQ(counter.at("args"), (Json{{"whole parameters", 10}, {"gradients", 20}, {"bound", 40}}));
}

TEST_F(Tracing, NamesMayHoldAnything) {
  {
    const auto recording = trace(asked_for());
    const std::string unit = "a\"b\\c\n";
    const tracing::Span span("gather", unit);
  }
  EXPECT_EQ(spans().at(0).at("args").at("unit"), "a\"b\\c ");
}

TEST_F(Tracing, WhatWasFlushedSurvivesAKill) {
  tracing::start(asked_for());
  { const tracing::Span span("gather", kUnit); }
  tracing::flush();
  std::ifstream file(folder_ / "a.trace.rank3.json");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  tracing::stop();
  EXPECT_NE(text.find("\"name\":\"gather\""), std::string::npos) << text;
}

TEST_F(Tracing, TheTimeIsTheWallClocks) {
  // Not `time()`, which lags behind by up to a tick.
  const auto seconds = [] {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  };
  const double before = seconds();
  {
    const auto recording = trace(asked_for());
    const tracing::Span span("gather", kNoUnit);
  }
  const double at = spans().at(0).at("ts").get<double>() / 1e6;
  EXPECT_GE(at, before - 1e-3); // it is written in whole microseconds
  EXPECT_LE(at, seconds() + 1e-3);
}

TEST_F(Tracing, OneTraceAtATime) {
  const auto recording = trace(asked_for());
  EXPECT_THROW((void)trace(asked_for()), Error);
}

TEST_F(Tracing, AMovedTraceGoesOn) {
  auto first = trace(asked_for());
  {
    const Trace second = std::move(first);
    EXPECT_TRUE(tracing::on());
  }
  EXPECT_FALSE(tracing::on());
}

TEST_F(Tracing, AFileThatCannotBeWrittenIsNamed) {
  try {
    (void)trace(folder_ / "missing" / "trace.json");
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("missing/trace.rank3.json"), std::string::npos) << error.what();
  }
}

} // namespace
} // namespace fsdp
