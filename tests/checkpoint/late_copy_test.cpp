// Copies that whoever writes makes first.

#include "checkpoint/late_copy.h"

#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/version.h>

namespace fsdp::testing {
namespace {

using disk::LateCopy;
using Write = std::function<void(at::Tensor&)>;

at::Tensor numbers() {
  return torch::arange(6, torch::kFloat);
}

at::Tensor place_for(const at::Tensor& tensor) {
  return torch::full(tensor.sizes(), -1, tensor.options());
}

class LateCopies : public ::testing::Test {
 protected:
  void SetUp() override {
    at::Tensor from = numbers(), to = place_for(from);
    if (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13 && LateCopy::make(from, to) == nullptr) {
      GTEST_SKIP() << "this LibTorch does not tell of writes";
    }
  }
};

TEST_F(LateCopies, HaveWhatWasThereWhoeverWritesMeanwhile) {
  const std::vector<Write> writes{
      [](at::Tensor& tensor) { tensor.mul_(2); },
      [](at::Tensor& tensor) { tensor[2] = 7; },
      [](at::Tensor& tensor) { tensor.data_ptr<float>()[0] = 7; },
      [](at::Tensor& tensor) { tensor.accessor<float, 1>()[5] = 7; },
      [](at::Tensor& tensor) { at::abs_out(tensor, tensor - 9); },
      [](at::Tensor& tensor) { at::_foreach_add_({tensor}, 1); },
      [](at::Tensor& tensor) {
        tensor.detach().view({2, 3}).t().fill_(7);
      },
      [](at::Tensor& tensor) { tensor.set_data(torch::ones(6)); },
      [](at::Tensor& tensor) { tensor.resize_({1000}).fill_(7); },
      [](at::Tensor& tensor) { tensor.set_(torch::ones(6).storage()); },
      [](at::Tensor& tensor) { tensor.reset(); },
      [](at::Tensor&) {},
  };
  for (size_t i = 0; i < writes.size(); ++i) {
    SCOPED_TRACE(i);
    at::Tensor tensor = numbers(), copy = place_for(tensor);
    const auto late = LateCopy::make(tensor, copy);
    ASSERT_NE(late, nullptr);
    EXPECT_EQ(tensor.sum().item<float>(), 15) << "to read it changes nothing";
    EXPECT_TRUE(copy.equal(place_for(copy)));
    writes[i](tensor);
    late->finish();
    EXPECT_TRUE(copy.equal(numbers()));
  }
}

TEST_F(LateCopies, LeaveTheTensorWhereItIs) {
  at::Tensor tensor = numbers(), copy = place_for(tensor);
  const void* address = tensor.const_data_ptr();
  for (int again = 0; again < 3; ++again) {
    const auto late = LateCopy::make(tensor, copy);
    EXPECT_EQ(tensor.const_data_ptr(), address);
    EXPECT_EQ(tensor.fill_(again).data_ptr(), address);
    late->finish();
    EXPECT_EQ(tensor.add_(1).data_ptr(), address);
  }
  tensor.resize_({1000}).fill_(3);
  EXPECT_TRUE(tensor.equal(torch::full({1000}, 3.F)));
}

TEST_F(LateCopies, AreOfViewsOfOneStorageToo) {
  const at::Tensor tensor = numbers();
  at::Tensor begin = tensor.narrow(0, 0, 2), end = tensor.narrow(0, 3, 3);
  at::Tensor copies[] = {place_for(begin), place_for(end)};
  const auto first = LateCopy::make(begin, copies[0]), second = LateCopy::make(end, copies[1]);
  tensor.fill_(7);
  first->finish();
  second->finish();
  EXPECT_TRUE(copies[0].equal(numbers().narrow(0, 0, 2)));
  EXPECT_TRUE(copies[1].equal(numbers().narrow(0, 3, 3)));
}

TEST_F(LateCopies, AreOfMemoryThatNoAllocatorKnows) { // as torch.load makes it
  void* memory = std::calloc(3, sizeof(float));
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(), 3 * sizeof(float), {memory, memory, &std::free, c10::kCPU}, nullptr, false);
  at::Tensor tensor = torch::empty({0}).set_(storage, 0, {3}, {1}), copy = place_for(tensor);
  const auto late = LateCopy::make(tensor, copy);
  tensor.add_(2);
  late->finish();
  EXPECT_TRUE(copy.equal(torch::zeros(3)));
  EXPECT_TRUE(tensor.equal(torch::full({3}, 2.F)));
}

TEST_F(LateCopies, AreNotOfMemoryThatOthersMayKnow) { // which is told by what lets go of it
  std::vector<float> foreign{1, 2, 3};
  at::Tensor tensor = torch::from_blob(foreign.data(), {3}, [](void*) {}), copy = place_for(tensor);
  const auto deleter = tensor.storage().data_ptr().get_deleter();
  EXPECT_EQ(LateCopy::make(tensor, copy), nullptr);
  EXPECT_EQ(tensor.storage().data_ptr().get_deleter(), deleter);
}

TEST_F(LateCopies, AreNotMadeWhereAnotherHookIsAtWork) {
  at::Tensor tensor = numbers(), copy = place_for(tensor);
  const at::Tensor snapshot = at::_lazy_clone(tensor);
  EXPECT_EQ(LateCopy::make(tensor, copy), nullptr);
  tensor.mul_(2);
  EXPECT_TRUE(snapshot.equal(numbers()));
  EXPECT_NE(LateCopy::make(tensor, copy), nullptr) << "it has been called";
}

TEST_F(LateCopies, EndWithWhoeverWantedThem) {
  at::Tensor tensor = numbers(), copy = place_for(tensor);
  LateCopy::make(tensor, copy).reset();
  tensor.mul_(2);
  EXPECT_TRUE(copy.equal(place_for(copy))) << "whose memory may be gone";
}

TEST_F(LateCopies, AreWaitedForByWhoeverLetsGo) { // of the memory too
  at::Tensor tensor = torch::zeros({int64_t{1} << 25}), copy = place_for(tensor);
  auto late = LateCopy::make(tensor, copy);
  const volatile float *first = copy.const_data_ptr<float>(), *last = first + copy.numel() - 1;
  std::thread other([&] { tensor.add_(1); }); // for some milliseconds
  while (*first != 0) {
  }
  late.reset();
  EXPECT_EQ(*last, 0);
  other.join();
}

TEST_F(LateCopies, AreMadeOnceByThreadsThatMeet) {
  const auto values = torch::arange(1000);
  for (int round = 0; round < 3000; ++round) {
    at::Tensor tensor = values.clone(), copy = place_for(tensor);
    auto late = LateCopy::make(tensor, copy);
    std::thread other([&] {
      late->finish();
      late.reset();
    });
    if (round % 3 == 0) {
      tensor.reset();
    } else {
      tensor.fill_(-round);
    }
    other.join();
    ASSERT_TRUE(copy.equal(values)) << round;
  }
}

TEST_F(LateCopies, DoNotHoldAForkedChild) {
  at::Tensor tensor = torch::zeros({int64_t{1} << 25}), copy = place_for(tensor);
  const auto late = LateCopy::make(tensor, copy);
  const volatile float* first = copy.const_data_ptr<float>();
  std::thread other([&] { late->finish(); }); // for some milliseconds
  while (*first != 0) {
  }
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    tensor.data_ptr<float>()[0] = 1;
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  other.join();
  EXPECT_EQ(status, 0);
  EXPECT_EQ(copy.sum().item<float>(), 0);
}

} // namespace
} // namespace fsdp::testing
