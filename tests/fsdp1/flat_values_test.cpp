// What users put into flat shards, and where they are found then.

#include <ATen/CPUGeneratorImpl.h>

#include "engine/flat_shard.h"
#include "fsdp1/train.h"
#include "fsdp1/two_layers.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

void show_as_one(nn::Module& module) {
  fsdp::nn::make_unit({&module}, {}, fsdp::nn::FlatCut{.alignment = 1, .shown_as_one = true});
}

class FlatValues : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, FlatValues, ::testing::Values(1, 2, 3, 4));

TEST_P(FlatValues, AreTakenElementByElement) {
  on_threads(GetParam(), [] {
    nn::Linear model(3, 2);
    show_as_one(*model);
    auto flat = model->parameters()[0];
    const auto values = torch::arange(2 * flat.numel(), torch::kFloat) + 100 * rank();
    flat.set_data(values.slice(0, 0, 2 * flat.numel(), 2));
    EXPECT_TRUE(is_sharded(flat));
    std::vector<at::Tensor> wanted;
    for (int of_rank = 0; of_rank < world_size(); ++of_rank) {
      wanted.push_back(torch::arange(flat.numel(), torch::kFloat) * 2 + 100 * of_rank);
    }
    const auto whole = torch::cat(wanted);
    EXPECT_TRUE(sharded(flat).full_tensor().narrow(0, 0, 8).equal(whole.narrow(0, 0, 8)));
    EXPECT_TRUE((model->weight * 1).flatten().equal(whole.narrow(0, 0, 6)));
    EXPECT_TRUE((model->bias * 1).equal(whole.narrow(0, 6, 2)));
  });
}

TEST_P(FlatValues, OfGradientsAreTakenElementByElement) {
  on_threads(GetParam(), [] {
    nn::Linear model(3, 2);
    show_as_one(*model);
    auto flat = model->parameters()[0];
    flat.mutable_grad() = torch::full({1}, 3.0).expand({flat.numel()});
    EXPECT_TRUE(sharded(flat).full_grad().narrow(0, 0, 8).equal(torch::full({8}, 3.0)));
  });
}

TEST_P(FlatValues, OfAnotherDtypeAreSeenInModulesWithinTheUnit) {
  on_threads(GetParam(), [] {
    for (const bool flat : {false, true}) {
      auto model = two_layers();
      flat ? show_as_one(*model) : (void)fully_shard(*model);
      model->to(torch::kDouble);
      EXPECT_TRUE(is_sharded(model->parameters()[0]));
      EXPECT_EQ(sharded_state_dict(*model[0])["weight"].local.scalar_type(), torch::kDouble);
      model->to(torch::kFloat);
      {
        const auto guard = fsdp::summon_full_params(*model[0]);
        ASSERT_EQ(model[0]->parameters().size(), 2);
        EXPECT_EQ(model[0]->parameters()[0].scalar_type(), torch::kFloat);
        EXPECT_EQ(model[0]->parameters()[0].sizes(), torch::IntArrayRef({4, 4}));
      }
      model->to(torch::kDouble);
      EXPECT_EQ(full_state_dict(*model[1])["weight"].scalar_type(), torch::kDouble);
    }
  });
}

TEST_P(FlatValues, MayBeWrittenBeforeTheyAreUsedInAnotherDtype) {
  on_threads(GetParam(), [] {
    nn::Linear model(3, 2);
    show_as_one(*model);
    model->to(torch::kDouble);
    {
      torch::NoGradGuard no_grad;
      model->parameters()[0].fill_(2);
    }
    EXPECT_TRUE((model->weight * 1).equal(torch::full({2, 3}, 2.0, torch::kDouble)));
    model->forward(torch::ones({1, 3}, torch::kDouble)).sum().backward();
    EXPECT_TRUE(model->parameters()[0].grad().defined());
  });
}

TEST_P(FlatValues, OfRandomNumbersAreThoseOfTheWhole) {
  on_threads(GetParam(), [] {
    nn::Linear model(3, 2);
    show_as_one(*model);
    auto flat = model->parameters()[0];
    const int64_t share = flat.numel();
    {
      torch::NoGradGuard no_grad;
      flat.uniform_(1, 2, at::detail::createCPUGenerator(3));
    }
    auto wanted = torch::empty({share * world_size()}).uniform_(1, 2, at::detail::createCPUGenerator(3));
    wanted.narrow(0, 8, wanted.numel() - 8).zero_();
    EXPECT_TRUE(flat.equal(wanted.narrow(0, rank() * share, share))) << "no padding";
    EXPECT_TRUE((model->weight * 1).flatten().equal(wanted.narrow(0, 0, 6)));
  });
}

TEST(FlatValues, AreZeroBetweenParametersFromTheBeginning) {
  on_threads(1, [] {
    for (int i = 0; i < 20; ++i) {
      std::vector<at::Tensor> memory; // that will be used again, and is not zero
      for (int j = 0; j < 8; ++j) {
        memory.push_back(torch::full({44}, 7.0));
      }
      memory.clear();
      nn::Linear model(5, 7); // 35 elements, a gap of one, 7
      fsdp::nn::make_unit({model.get()}, {}, fsdp::nn::FlatCut{.alignment = 16, .shown_as_one = true});
      EXPECT_EQ(model->parameters()[0][35].item<float>(), 0);
    }
  });
}

TEST_P(FlatValues, AreInputsOfBackwards) {
  on_threads(GetParam(), [] {
    auto model = two_layers();
    show_as_one(*model[0]);
    show_as_one(*model);
    const auto root = model->named_parameters()["_flat_param"], inner = model->named_parameters()["0._flat_param"];
    const std::vector<at::Tensor> inputs{inner};
    model->forward(torch::ones({1, 4})).sum().backward({}, std::nullopt, false, inputs);
    EXPECT_TRUE(inner.grad().defined());
    EXPECT_FALSE(root.grad().defined());
  });
}

} // namespace
} // namespace fsdp::testing
