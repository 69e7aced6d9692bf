// A handle is whole to whoever reads it, and a write to it outside a step reaches the shards.

#include <chrono>
#include <functional>
#include <thread>

#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class Handles : public ::testing::TestWithParam<int> {};

TEST_P(Handles, MetadataAndViewsAreNoTouch) {
  on_threads(GetParam(), [] {
    nn::Linear model(6, 4);
    auto unit = fully_shard(*model).unit();
    EXPECT_EQ(model->weight.sizes(), (std::vector<int64_t>{4, 6}));
    EXPECT_EQ(model->weight.t().size(0), 6);
    auto view = model->weight.detach().view({24}).narrow(0, 3, 5);
    EXPECT_EQ(torch::empty_like(model->weight).numel(), 24);
    EXPECT_EQ(unit->state(), engine::UnitState::kSharded);
    EXPECT_EQ(view.clone().numel(), 5); // a read through a view
    EXPECT_EQ(unit->state(), engine::UnitState::kWhole);
  });
}

TEST_P(Handles, AOneRankMayReadAlone) {
  on_threads(GetParam(), [] {
    nn::Linear model(6, 4);
    fully_shard(*model);
    if (rank() == 0) {
      EXPECT_GT(model->weight.norm().item<float>(), 0);
    }
    barrier();
  });
}

TEST_P(Handles, AWriteOutsideAStepReachesTheShards) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    fully_shard(*model[0]);
    fully_shard(*model);
    torch::NoGradGuard no_grad;
    const auto values = torch::arange(15, torch::kFloat).view({3, 5});
    model[0]->as<nn::Linear>()->weight.copy_(values);
    model[0]->as<nn::Linear>()->bias.fill_(3);
    model[1]->as<nn::Linear>()->weight.mul_(0);
    EXPECT_TRUE(torch::equal(whole_of(*model, "0.weight"), values));
    EXPECT_TRUE(torch::equal(whole_of(*model, "0.bias"), torch::full({3}, 3.0)));
    EXPECT_TRUE(torch::equal(whole_of(*model, "1.weight"), torch::zeros({2, 3})));
    EXPECT_TRUE(torch::equal(model[0]->as<nn::Linear>()->weight * 1, values));
  });
}

// Shards are memory, in which nothing says that it is to be seen as a conjugate.
TEST_P(Handles, ConjugatesThatTheyAreGivenAreValues) {
  on_threads(GetParam(), [] {
    struct Model : nn::Module {
      Model()
          : weight(register_parameter("weight", torch::complex(torch::ones({3, 2}), torch::full({3, 2}, 2.0)))),
            real(register_parameter("real", torch::ones({4}))) {}
      at::Tensor weight, real;
    } model;
    fully_shard(model);
    const auto now = [&] { return sharded(model.parameters()[0]).full_tensor(); };
    const auto expected = [](double imaginary) {
      return torch::complex(torch::ones({3, 2}), torch::full({3, 2}, imaginary));
    };
    model.parameters()[0].set_data(model.parameters()[0].detach().conj()); // a view of the shard itself
    EXPECT_TRUE(now().equal(expected(-2)));
    EXPECT_TRUE((model.weight.detach() * 1).equal(expected(-2)));
    model.parameters()[0].set_data((model.parameters()[0].detach() * 2).conj());
    EXPECT_TRUE(now().equal(expected(2) * 2));
    model.weight.set_data(model.weight.conj());
    EXPECT_TRUE(now().equal(expected(-2) * 2));
    {
      const torch::NoGradGuard no_grad;
      model.weight.mul_(1); // that was no forward
    }
    EXPECT_TRUE((model.weight.detach() * 1).equal(expected(-2) * 2));
    const auto shard = model.parameters()[1].detach();
    model.parameters()[1].set_data(torch::imag(torch::complex(torch::zeros_like(shard), shard).conj()));
    EXPECT_TRUE(sharded(model.parameters()[1]).full_tensor().equal(-torch::ones({4})));
  });
}

TEST_P(Handles, ApplyInitializesAShardedModel) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    fully_shard(*model[0]);
    fully_shard(*model);
    model->apply([](nn::Module& module) {
      if (auto* linear = module.as<nn::Linear>()) {
        torch::NoGradGuard no_grad;
        linear->weight.fill_(0.5);
        linear->bias.zero_();
      }
    });
    auto y = model->forward(torch::ones({1, 5}));
    EXPECT_TRUE(torch::equal(y, torch::full({1, 2}, 2.5 * 0.5 * 3)));
  });
}

TEST_P(Handles, ShardsWrittenByUsersAreSeenByTheNextForward) {
  on_threads(GetParam(), [] {
    nn::Linear model(5, 3);
    fully_shard(*model);
    for (int round = 1; round <= 3; ++round) {
      {
        torch::NoGradGuard no_grad;
        for (auto& shard : model->parameters()) {
          shard.fill_(round);
        }
      }
      EXPECT_TRUE(torch::equal(model->forward(torch::ones({1, 5})), torch::full({1, 3}, 6.0 * round)));
    }
  });
}

// Collectives in between end the phase in which all ranks write; the next write has to begin another.
TEST_P(Handles, WritesAfterOtherCollectivesWaitForTheRanksToo) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 4);
    fully_shard(*model);
    torch::NoGradGuard no_grad;
    const std::vector<std::function<void()>> between{
        [&] { whole_of(*model, "weight"); },
        [&] {
          if (rank() == 0) {
            model->bias.norm();
          }
          barrier();
        }};
    double value = 1;
    for (int round = 0; round < 6; ++round) {
      const auto write = [&] {
        if (rank() + 1 == world_size()) { // last
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        ++value;
        for (auto& shard : model->parameters()) {
          shard.fill_(value);
        }
      };
      write();
      between[round % 2]();
      write();
      EXPECT_TRUE(torch::equal(model->weight + 0, torch::full({4, 4}, value))) << round;
    }
  });
}

TEST_P(Handles, InferenceModeAndNoGrad) {
  on_threads(GetParam(), [] {
    auto subject = make_seeded({.make = [] { return subjects::tied(); }});
    barrier();
    const float wanted = subject.loss(0, 0).item<float>();
    for (auto& part : subject.parts) {
      fully_shard(*part);
    }
    fully_shard(*subject.module);
    {
      c10::InferenceMode inference;
      EXPECT_EQ(subject.loss(0, 0).item<float>(), wanted);
    }
    torch::NoGradGuard no_grad;
    EXPECT_EQ(subject.loss(0, 0).item<float>(), wanted);
  });
}

TEST_P(Handles, ChangingTheDtypeAfterSharding) {
  on_threads(GetParam(), [] {
    nn::Linear model(5, 3);
    fully_shard(*model);
    model->forward(torch::ones({1, 5})).sum().backward();
    model->zero_grad();
    model->to(torch::kDouble);
    auto loss = model->forward(torch::ones({1, 5}, torch::kDouble)).sum();
    EXPECT_EQ(loss.scalar_type(), torch::kDouble);
    loss.backward();
    for (const auto& shard : model->parameters()) {
      EXPECT_EQ(shard.scalar_type(), torch::kDouble);
      EXPECT_TRUE(is_sharded(shard));
      EXPECT_EQ(shard.grad().scalar_type(), torch::kDouble);
    }
  });
}

TEST_P(Handles, FreezingAfterSharding) {
  on_threads(GetParam(), [] {
    nn::Linear model(5, 3);
    fully_shard(*model);
    for (int round = 0; round < 2; ++round) {
      const bool trainable = round == 1;
      model->named_parameters()["weight"].set_requires_grad(trainable);
      model->zero_grad();
      model->forward(torch::ones({1, 5})).sum().backward();
      EXPECT_EQ(model->named_parameters()["weight"].grad().defined(), trainable);
      EXPECT_TRUE(model->named_parameters()["bias"].grad().defined());
    }
  });
}

TEST_P(Handles, TwoForwardsBeforeOneBackwardAndTwoBackwards) {
  on_threads(GetParam(), [] {
    auto subject = make_seeded({.make = [] { return subjects::tied(); }});
    barrier();
    for (auto& part : subject.parts) {
      fully_shard(*part);
    }
    fully_shard(*subject.module);
    auto gradient = [&] { return sharded(parameters(*subject.module)[0]).full_grad(); };
    (subject.loss(0, 0) + subject.loss(0, 1)).backward();
    const auto together = gradient();
    subject.module->zero_grad();
    auto first = subject.loss(0, 0), second = subject.loss(0, 1);
    first.backward();
    second.backward();
    EXPECT_TRUE(torch::allclose(gradient(), together));
    subject.module->zero_grad();
    auto again = subject.loss(0, 0);
    again.backward({}, /*retain_graph=*/true);
    const auto once = gradient();
    again.backward();
    EXPECT_TRUE(torch::equal(gradient(), once + once));
  });
}

TEST_P(Handles, AHandlesGradientThatWasGivenOtherData) {
  on_threads(GetParam(), [] {
    nn::Linear model(4, 3);
    const at::Tensor handle = model->weight;
    fully_shard(*model);
    const auto step = [&] {
      model->zero_grad();
      model->forward(torch::ones({2, 4})).sum().backward();
      return model->parameters()[0].grad().clone();
    };
    const auto expected = step();
    handle.mutable_grad().set_data(torch::ones({3, 4}));
    EXPECT_TRUE(torch::equal(step(), expected));
    handle.mutable_grad().set_data(torch::ones({3, 4}));
  });
}

TEST_P(Handles, AnIndexIsSeenBehindMissingOnes) {
  on_threads(GetParam(), [] {
    nn::ParameterList model;
    const auto index = torch::tensor({2, 0, 1});
    model->append(index.clone().set_requires_grad(false));
    model->append(torch::ones({3}));
    fully_shard(*model);
    const auto x = torch::arange(12, torch::kFloat).view({4, 3});
    const c10::List<std::optional<at::Tensor>> indices({std::nullopt, model[0]});
    EXPECT_TRUE(torch::equal(at::index(x, indices), x.index_select(1, index)));
  });
}

// The second unit is gathered ahead while the first is about to be read; new data behind its shards makes every reader
// let go of the group's memory, the first unit included.
TEST_P(Handles, APrefetchThatMovesShardsLeavesTheTouchedUnitWhole) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(4, 4), nn::Linear(4, 4), nn::Linear(4, 4));
    for (const auto& layer : *model) {
      fully_shard(*layer.ptr());
    }
    fully_shard(*model);
    const auto x = torch::ones({2, 4});
    for (int step = 0; step < 3; ++step) { // the schedule is learned
      model->forward(x).sum().backward();
    }
    for (int64_t moved = 0; moved < 3; ++moved) {
      torch::NoGradGuard no_grad;
      const auto expected = model->forward(x);
      for (auto& shard : model[moved]->parameters()) {
        shard.set_data(shard.clone());
      }
      torch::AutoGradMode grad(true);
      const auto out = model->forward(x);
      EXPECT_TRUE(torch::equal(out, expected)) << moved;
      out.sum().backward();
    }
  });
}

struct EncoderImpl : nn::Module {
  EncoderImpl() : linear(register_module("linear", nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    seen = x.scalar_type();
    return linear(x);
  }
  at::Tensor encode(const at::Tensor& x) {
    return forward(x);
  }
  nn::Linear linear;
  c10::ScalarType seen = torch::kFloat;
};
FSDP_MODULE(Encoder);

TEST_P(Handles, BoundariesCast) {
  on_threads(GetParam(), [] {
    Encoder model;
    const auto x = torch::ones({2, 4});
    fully_shard(*model, {.mp_policy = {.param_dtype = torch::kBFloat16, .output_dtype = torch::kDouble}});
    EXPECT_EQ(model(x).scalar_type(), torch::kDouble);
    EXPECT_EQ(model->seen, torch::kBFloat16);
    EXPECT_EQ(
        model->forward(x).scalar_type(), torch::kBFloat16); // no boundary, but matrix products take what they are given
    EXPECT_EQ(model->seen, torch::kFloat);
    EXPECT_EQ(call_method(model, "encode", &EncoderImpl::encode, x).scalar_type(), torch::kBFloat16);
    register_fsdp_forward_method(*model, "encode");
    EXPECT_EQ(call_method(model, "encode", &EncoderImpl::encode, x).scalar_type(), torch::kDouble);
  });
}

TEST_P(Handles, EverythingIsFreedWithTheModel) {
  on_threads(GetParam(), [] {
    std::weak_ptr<engine::Unit> root, part;
    {
      nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
      part = fully_shard(*model[0]).unit();
      root = fully_shard(*model).unit();
      torch::optim::AdamW optimizer(model->parameters());
      model->forward(torch::ones({2, 5})).sum().backward();
      optimizer.step();
      EXPECT_FALSE(part.expired());
    }
    EXPECT_TRUE(part.expired());
    EXPECT_TRUE(root.expired());
    {
      nn::Sequential model(nn::Linear(5, 3));
      part = fully_shard(*model[0]).unit();
      root = fully_shard(*model).unit(); // without parameters of its own
    }
    EXPECT_TRUE(part.expired());
    EXPECT_TRUE(root.expired());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Handles, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
