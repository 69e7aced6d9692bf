#include "base/stream.h"

#include <gtest/gtest.h>

namespace fsdp {
namespace {

const c10::Device kHost(c10::kCPU);

TEST(StreamOnCpu, ThereIsOnlyOne) {
  EXPECT_FALSE(has_streams(kHost));
  EXPECT_EQ(new_stream(kHost), current_stream(kHost));
  EXPECT_EQ(new_stream(kHost, /*high_priority=*/true), current_stream(kHost));
}

TEST(StreamOnCpu, GuardsAndWaitsDoNothing) {
  Stream stream = new_stream(kHost);
  StreamGuard stream_guard(stream);
  DeviceGuard device_guard(kHost);
  EXPECT_NO_THROW(synchronize(stream));
  EXPECT_NO_THROW(wait_stream(stream, current_stream(kHost)));
  EXPECT_EQ(current_stream(kHost), stream);
}

TEST(EventOnCpu, IsDoneWhetherRecordedOrNot) {
  Event event;
  EXPECT_TRUE(event.query());
  event.block(current_stream(kHost));
  event.record(current_stream(kHost));
  EXPECT_TRUE(event.query());
  event.block(current_stream(kHost));
  event.synchronize();
}

TEST(EventOnCpu, MovesButDoesNotCopy) {
  static_assert(!std::is_copy_constructible_v<Event> && std::is_nothrow_move_constructible_v<Event>);
  Event event;
  event.record(current_stream(kHost));
  Event moved = std::move(event);
  EXPECT_TRUE(moved.query());
}

} // namespace
} // namespace fsdp
