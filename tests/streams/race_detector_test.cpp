#include <gtest/gtest.h>
#include <torch/torch.h>

#include "base/stream.h"
#include "streams/queued_device.h"

/// The proof is worth what its detector finds.
namespace fsdp::testing {
namespace {

const c10::Device kDevice = queued_device::device(0);

class Streams : public ::testing::Test {
 protected:
  void SetUp() override {
    queued_device::detector().begin_test();
  }
  static std::vector<std::string> races() {
    return queued_device::detector().take_races();
  }
  static at::Tensor ones() {
    return torch::ones({8}, torch::TensorOptions().device(kDevice));
  }

  Stream first_ = new_stream(kDevice);
  Stream second_ = new_stream(kDevice);
};

TEST_F(Streams, OneStreamIsInOrder) {
  at::Tensor x = ones();
  x.add_(1);
  EXPECT_EQ((x * x).sum().item<float>(), 32);
  x.reset();
  EXPECT_EQ(races(), std::vector<std::string>());
}

TEST_F(Streams, AReadOnAnotherStreamNeedsAnEvent) {
  const at::Tensor x = ones();
  const StreamGuard guard(first_);
  const at::Tensor y = x + 1;
  ASSERT_EQ(races().size(), 1);
  wait_stream(second_, first_);
  const StreamGuard next(second_);
  const at::Tensor z = y + 1;
  EXPECT_EQ(races().size(), 0);
}

TEST_F(Streams, AWriteWaitsForReaders) {
  at::Tensor x = ones();
  wait_stream(first_, current_stream(kDevice));
  {
    const StreamGuard guard(first_);
    const at::Tensor y = x + 1;
  }
  x.zero_();
  const auto found = races();
  ASSERT_EQ(found.size(), 1);
  EXPECT_NE(found[0].find("aten::zero_ does not come after aten::add"), std::string::npos) << found[0];
}

TEST_F(Streams, MemoryIsNotGivenAgainBeforeItsLastUse) {
  for (const bool ordered : {true, false}) {
    at::Tensor x = ones();
    wait_stream(first_, current_stream(kDevice));
    {
      const StreamGuard guard(first_);
      const at::Tensor y = x + 1;
    }
    if (ordered) {
      wait_stream(current_stream(kDevice), first_);
    }
    x.reset();
    EXPECT_EQ(races().size(), 0);
    const at::Tensor next = ones();
    EXPECT_EQ(races().size(), ordered ? 0 : 1);
  }
}

TEST_F(Streams, MemoryComesFromTheStreamThatAllocatedIt) {
  const at::Tensor x = torch::empty({8}, torch::TensorOptions().device(kDevice));
  const StreamGuard guard(first_);
  x.zero_(); // what had the memory before may still be in use
  EXPECT_EQ(races().size(), 1);
}

TEST_F(Streams, UseAfterReleaseIsFound) {
  at::Tensor x = ones();
  void* memory = x.data_ptr();
  x.reset();
  const auto dangling = torch::from_blob(memory, {8}, torch::TensorOptions().device(kDevice));
  queued_device::use(dangling, /*writes=*/false, first_, "read");
  EXPECT_EQ(races(), std::vector<std::string>{"read uses memory that was given back"});
}

TEST_F(Streams, AWaitOfTheHostIsAnOrder) {
  const at::Tensor x = ones();
  synchronize(current_stream(kDevice));
  const StreamGuard guard(first_);
  const at::Tensor y = x + 1;
  EXPECT_EQ(races().size(), 0);
}

TEST_F(Streams, AnEventOrdersOnlyWhatItRecorded) {
  at::Tensor x = ones();
  Event event;
  event.record(current_stream(kDevice));
  EXPECT_FALSE(event.query());
  event.block(first_);
  x.add_(1);
  const StreamGuard guard(first_);
  const at::Tensor y = x + 1;
  EXPECT_EQ(races().size(), 1);
  event.synchronize();
  EXPECT_TRUE(event.query());
}

TEST_F(Streams, HostMemoryOfACopyIsWatchedToo) {
  const auto pinned = torch::ones({8}, torch::TensorOptions().pinned_memory(true));
  const auto copy = pinned.to(kDevice, /*non_blocking=*/true);
  auto& detector = queued_device::detector();
  detector.written_by_host(pinned.data_ptr(), 0, "write");
  EXPECT_EQ(races().size(), 1);
  synchronize(current_stream(kDevice));
  detector.written_by_host(pinned.data_ptr(), 0, "write");
  EXPECT_EQ(races().size(), 0);
}

} // namespace
} // namespace fsdp::testing
