// What users freeze or thaw, the handle or the shard, the other follows.

#include "base/phrase.h"
#include "engine/unit.h"
#include "nn/parity.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class Freezing : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Freezing, ::testing::Values(1, 2, 3));

struct Way {
  const char* name;
  std::function<void(at::Tensor&, bool)> set;
};

const std::vector<Way>& ways() {
  static const std::vector<Way> ways{
      {"set_requires_grad", [](at::Tensor& tensor, bool wanted) { tensor.set_requires_grad(wanted); }},
      {"requires_grad_", [](at::Tensor& tensor, bool wanted) { tensor.requires_grad_(wanted); }}};
  return ways;
}

nn::Sequential sharded_model() {
  nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 2));
  fully_shard(*model[0]);
  fully_shard(*model);
  return model;
}

bool gets_gradient(nn::Sequential& model, size_t index) {
  model->zero_grad();
  model->forward(torch::ones({2, 4})).sum().backward();
  return model->parameters()[index].grad().defined();
}

TEST_P(Freezing, ThroughAMemberAndThroughTheShardInTurns) {
  on_threads(GetParam(), [] {
    for (const auto& way : ways()) {
      SCOPED_TRACE(way.name);
      auto model = sharded_model();
      auto& weight = model[0]->as<nn::Linear>()->weight;
      auto shard = model->parameters()[0];
      EXPECT_TRUE(gets_gradient(model, 0));
      for (const bool wanted : {false, true}) {
        way.set(weight, wanted);
        EXPECT_EQ(gets_gradient(model, 0), wanted) << "through the member";
        EXPECT_EQ(weight.requires_grad(), wanted);
        EXPECT_EQ(shard.requires_grad(), wanted);
        way.set(shard, !wanted);
        EXPECT_EQ(gets_gradient(model, 0), !wanted) << "through the shard";
        EXPECT_EQ(weight.requires_grad(), !wanted);
        way.set(shard, wanted);
        way.set(weight, wanted);
        EXPECT_EQ(gets_gradient(model, 0), wanted) << "through both";
      }
    }
  });
}

TEST_P(Freezing, OfAllMembersBeforeAnOptimizerIsBuilt) {
  on_threads(GetParam(), [] {
    auto model = sharded_model();
    model[0]->as<nn::Linear>()->weight.set_requires_grad(false);
    int trainable = 0;
    for (const auto& shard : parameters(*model)) {
      trainable += shard.requires_grad() ? 1 : 0;
    }
    EXPECT_EQ(trainable, 3);
    {
      const auto guard = summon_full_params(*model);
      EXPECT_FALSE(model->parameters()[0].requires_grad());
    }
  });
}

TEST_P(Freezing, OutlastsAnotherDtype) {
  on_threads(GetParam(), [] {
    auto model = sharded_model();
    auto& first = *model[0]->as<nn::Linear>();
    first.weight.set_requires_grad(false);
    model->to(torch::kDouble);
    model->forward(torch::ones({2, 4}, torch::kDouble)).sum().backward();
    EXPECT_FALSE(first.weight.requires_grad());
    EXPECT_FALSE(model->parameters()[0].grad().defined());
    EXPECT_TRUE(model->parameters()[1].grad().defined());
  });
}

TEST_P(Freezing, BetweenForwardAndBackwardDropsTheGradient) {
  on_threads(GetParam(), [] {
    for (const auto& way : ways()) {
      auto model = sharded_model();
      const auto loss = model->forward(torch::ones({2, 4})).sum();
      way.set(model[0]->as<nn::Linear>()->weight, false);
      loss.backward();
      EXPECT_FALSE(model->parameters()[0].grad().defined());
      EXPECT_TRUE(model->parameters()[1].grad().defined());
      EXPECT_FALSE(gets_gradient(model, 0));
    }
  });
}

std::vector<at::Tensor> gradients(nn::Sequential& model) {
  std::vector<at::Tensor> all;
  for (const auto& shard : parameters(*model)) {
    all.push_back(sharded(shard).full_grad());
  }
  return all;
}

// As adapters are switched off, for a reference, between a forward and its backward.
TEST_P(Freezing, ForAForwardInBetweenKeepsTheGradient) {
  on_threads(GetParam(), [] {
    auto model = sharded_model();
    auto& first = *model[0]->as<nn::Linear>();
    // Of the first weight the backward reads nothing before its gradient comes, unless the input needs one too.
    for (const bool of_input : {false, true}) {
      const auto input = torch::ones({2, 4}, torch::requires_grad(of_input));
      model->zero_grad();
      model->forward(input).sum().backward();
      const auto expected = gradients(model);
      for (const auto& way : ways()) {
        for (at::Tensor weight : {first.weight, model->parameters()[0]}) {
          for (const bool records : {false, true}) {
            SCOPED_TRACE(phrase("{} of {}, records {}", way.name, weight.is_same(first.weight), records));
            model->zero_grad();
            const auto loss = model->forward(input).sum();
            way.set(weight, false);
            {
              const c10::AutoGradMode grad_mode(records);
              model->forward(torch::ones({2, 4}));
            }
            way.set(weight, true);
            loss.backward();
            const auto found = gradients(model);
            for (size_t i = 0; i < expected.size(); ++i) {
              ASSERT_TRUE(found[i].defined()) << i;
              EXPECT_TRUE(at::equal(found[i], expected[i])) << i;
            }
          }
        }
      }
    }
  });
}

} // namespace
} // namespace fsdp::testing
