#pragma once

#include <algorithm>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/deferred_init.h>

/// A module that is recorded beside the same one that is built as ever.
namespace fsdp::testing {

enum class Order { kForward, kBackward };

inline at::Tensor state_of_generator() {
  return at::detail::getDefaultCPUGenerator().get_state();
}

inline void expect_same_bits(const at::Tensor& got, const at::Tensor& wanted, const std::string& name) {
  ASSERT_EQ(got.scalar_type(), wanted.scalar_type()) << name;
  ASSERT_EQ(got.sizes(), wanted.sizes()) << name;
  ASSERT_EQ(got.strides(), wanted.strides()) << name;
  ASSERT_EQ(got.storage_offset(), wanted.storage_offset()) << name;
  ASSERT_EQ(got.requires_grad(), wanted.requires_grad()) << name;
  ASSERT_EQ(got.is_leaf(), wanted.is_leaf()) << name;
  const auto bytes = [](const at::Tensor& tensor) { return tensor.detach().contiguous().flatten().view(torch::kByte); };
  EXPECT_TRUE(got.numel() == 0 || torch::equal(bytes(got), bytes(wanted))) << name;
}

using Tensors = torch::OrderedDict<std::string, at::Tensor>;

inline Tensors tensors_of(const torch::nn::Module& module) {
  Tensors tensors = module.named_parameters();
  for (const auto& buffer : module.named_buffers()) {
    tensors.insert("buffer " + buffer.key(), buffer.value());
  }
  return tensors;
}

/// Every parameter and every buffer, and the generator after it.
template <typename Make>
void expect_same_construction(const Make& make, Order order = Order::kForward) {
  torch::manual_seed(7);
  const auto ordinary = make();
  const auto state = state_of_generator();
  torch::manual_seed(7);
  const auto recorded = deferred_init(make);
  EXPECT_TRUE(torch::equal(state_of_generator(), state)) << "the generator is elsewhere after the recording";
  const Tensors wanted = tensors_of(*ordinary), got = tensors_of(*recorded);
  ASSERT_EQ(got.keys(), wanted.keys());
  auto items = got.items();
  if (order == Order::kBackward) {
    std::reverse(items.begin(), items.end());
  }
  for (const auto& item : items) {
    EXPECT_TRUE(is_deferred(item.value())) << item.key();
  }
  torch::rand({5}); // what is made of the record does not depend on where the generator is
  const auto before = state_of_generator();
  for (const auto& item : items) {
    materialize(item.value());
  }
  EXPECT_FALSE(is_deferred(*recorded));
  EXPECT_TRUE(torch::equal(state_of_generator(), before)) << "the generator was drawn from later";
  for (const auto& item : items) {
    expect_same_bits(item.value(), wanted[item.key()], item.key());
  }
}

} // namespace fsdp::testing
