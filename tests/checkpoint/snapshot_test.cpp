#include "checkpoint/snapshot.h"

#include <functional>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::disk {
namespace {

at::Tensor numbers() {
  return torch::arange(6, torch::kFloat);
}

TEST(Snapshot, KeepsWhatWasThere) {
  const std::vector<std::function<void(at::Tensor&)>> writes{
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
      [](at::Tensor& tensor) { tensor.reset(); },
  };
  for (const auto& write : writes) {
    at::Tensor tensor = numbers();
    const at::Tensor snapshot = snapshot_of(tensor);
    write(tensor);
    EXPECT_TRUE(at::equal(snapshot, numbers())) << "write " << &write - writes.data();
  }
}

TEST(Snapshot, ViewsGoOnSeeingEachOther) {
  const at::Tensor tensor = numbers(), view = tensor.narrow(0, 2, 2);
  const at::Tensor snapshot = snapshot_of(view);
  view.fill_(7);
  EXPECT_TRUE(at::equal(tensor, torch::tensor({0.F, 1.F, 7.F, 7.F, 4.F, 5.F})));
  tensor.fill_(8);
  EXPECT_TRUE(at::equal(view, torch::full({2}, 8.F)));
  EXPECT_TRUE(at::equal(snapshot, torch::tensor({2.F, 3.F})));
}

TEST(Snapshot, NothingIsCopiedUnlessSomethingIsWrittenMeanwhile) {
  const at::Tensor tensor = numbers();
  const void* address = tensor.const_data_ptr();
  at::Tensor snapshot = snapshot_of(tensor), another = snapshot_of(tensor);
  EXPECT_EQ(snapshot.const_data_ptr(), address);
  EXPECT_EQ(another.const_data_ptr(), address);
  snapshot.reset();
  another.reset();
  tensor.mul_(2);
  EXPECT_EQ(tensor.const_data_ptr(), address);
  EXPECT_TRUE(at::equal(tensor, numbers() * 2));
}

TEST(Snapshot, IsOfMemoryThatTheAllocatorGave) {
  std::vector<float> foreign(6);
  EXPECT_FALSE(snapshot_of(torch::from_blob(foreign.data(), {6})).defined()) << "others may write there";
  EXPECT_FALSE(snapshot_of(torch::empty({0})).defined());
  EXPECT_FALSE(snapshot_of(torch::empty({6}, torch::kMeta)).defined());
}

TEST(Snapshot, HasNoPartInTheGraph) {
  const at::Tensor tensor = numbers().requires_grad_();
  EXPECT_FALSE(snapshot_of(tensor).requires_grad());
}

} // namespace
} // namespace fsdp::disk
