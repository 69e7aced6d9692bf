// What is recorded has no memory, though LibTorch and constructors may write some of it by its address.

#include "nn/same_construction.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

#ifdef FSDP_HAS_DATA_PTR_GUARD
namespace nn = torch::nn;

TEST(DeferredInit, SaysWhatToDoBeforeMemoryIsReadByItsAddress) {
  const auto layer = deferred_init([] { return nn::Linear(3, 2); });
  try {
    layer->weight.data_ptr<float>();
    ADD_FAILURE() << "there is no memory yet";
  } catch (const std::exception& error) {
    EXPECT_TRUE(contains(error.what(), "deferred_init"));
    EXPECT_TRUE(contains(error.what(), "fsdp::materialize"));
  }
}

// What is written later would be lost.
TEST(DeferredInit, EndsWritesByAddressWhereTheyAreRead) {
  const auto layer = deferred_init([] {
    nn::Linear layer(3, 3);
    const torch::NoGradGuard no_grad;
    const auto values = torch::empty({3});
    values.data_ptr<float>()[0] = 1;
    values.data_ptr<float>()[1] = 2;
    values.data_ptr<float>()[2] = 3;
    layer->bias.copy_(values);
    EXPECT_THROW(values.data_ptr<float>(), c10::Error);
    return layer;
  });
  materialize(layer);
  EXPECT_TRUE(layer->bias.equal(torch::tensor({1., 2., 3.}, torch::kFloat))) << layer->bias;
}

// A row that is filled anew and copied; none of its values are lost.
TEST(DeferredInit, FollowsAddressesThatWereTakenBeforeOperatorsSawThem) {
  const auto make = [](bool deferred) {
    const torch::NoGradGuard no_grad;
    nn::Linear layer(3, 4);
    auto row = torch::empty({3});
    auto* values = row.data_ptr<float>();
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 3; ++j) {
        values[j] = static_cast<float>(10 * i + j);
      }
      layer->weight[i].copy_(row);
    }
    values[0] = 7;
    layer->bias.fill_(1).narrow(0, 0, 3).add_(row);
    row.mul_(2);
    values[0] = 5;
    if (deferred) {
      EXPECT_TRUE(contains(error_message([&] { layer->bias.narrow(0, 0, 3).add_(row); }), "who took its address"));
    }
    row.zero_();
    return layer;
  };
  const auto deferred = deferred_init([&] { return make(true); }), plain = make(false);
  materialize(deferred);
  EXPECT_TRUE(deferred->weight.equal(plain->weight)) << deferred->weight;
  EXPECT_TRUE(deferred->bias.equal(plain->bias)) << deferred->bias;
}

TEST(DeferredInit, KeepsWhatWasWrittenByAddressWhereTheFirstOperatorFails) {
  const auto layer = deferred_init([] {
    const torch::NoGradGuard no_grad;
    nn::Linear layer(4, 3);
    const auto values = torch::empty({3});
    auto* const address = values.data_ptr<float>();
    for (int row = 0; row < 3; ++row) {
      std::fill_n(address, 3, static_cast<float>(row));
      EXPECT_THROW(values.copy_(torch::ones({4})), c10::Error);
      layer->weight.select(1, row).copy_(values);
    }
    return layer;
  });
  materialize(layer);
  for (int row = 0; row < 3; ++row) {
    EXPECT_TRUE(layer->weight.select(1, row).eq(row).all().item<bool>()) << layer->weight;
  }
}
#endif

} // namespace
} // namespace fsdp::testing
