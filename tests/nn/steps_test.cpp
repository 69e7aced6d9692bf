// Steps that are not like the others: broken off, after a forward that trains nothing, with frozen parameters.

#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/counting_group.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

/// Four layers, each a unit, with an interruption between the second and the third in backward.
class Stack {
 public:
  explicit Stack(const FullyShardOptions& options = {}) {
    static std::mutex mutex;
    {
      std::lock_guard lock(mutex); // threads share one random number generator
      torch::manual_seed(1);
      for (int i = 0; i < 4; ++i) {
        layers_->push_back(nn::Linear(6, 6));
      }
    }
    for (const auto& layer : *layers_) {
      fully_shard(*layer.ptr(), options);
    }
    root_.emplace(fully_shard(*layers_, options));
  }

  FSDPModule& root() {
    return *root_;
  }
  nn::LinearImpl& layer(int index) {
    return *layers_[index]->as<nn::Linear>();
  }

  /// `interrupt` runs in backward, when the gradients of the last two layers have come.
  at::Tensor loss(int step, const std::function<void()>& interrupt = nullptr) {
    auto x = subjects::data(rank(), step, {3, 6});
    x = torch::tanh(layer(1).forward(torch::tanh(layer(0).forward(x))));
    if (interrupt) {
      x.register_hook([interrupt](at::Tensor) -> at::Tensor {
        interrupt();
        return {};
      });
    }
    return layer(3).forward(torch::tanh(layer(2).forward(x))).pow(2).sum();
  }

  void forget_gradients() {
    layers_->zero_grad();
  }

  std::vector<at::Tensor> gradients_of_step() {
    forget_gradients();
    loss(0).backward();
    std::vector<at::Tensor> wholes;
    for (const auto& shard : layers_->parameters()) {
      wholes.push_back(sharded(shard).full_grad());
    }
    return wholes;
  }

 private:
  nn::Sequential layers_;
  std::optional<FSDPModule> root_;
};

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(torch::equal(got[i], wanted[i])) << "gradient " << i;
  }
}

/// A backward breaks off while gradients are on their way; forgotten, it leaves no trace.
void break_off_and_go_on(const FullyShardOptions& options) {
  Stack stack(options);
  const auto wanted = stack.gradients_of_step();
  for (int round = 0; round < 3; ++round) {
    const auto reads_no_weight = stack.layer(0).forward(subjects::data(rank(), round, {3, 6})).sum(); // in backward
    const auto loss = stack.loss(round + 1, [] { throw std::runtime_error("in the middle of backward"); });
    EXPECT_THROW(loss.backward(), std::runtime_error);
    EXPECT_GT(stack.root().unit()->runtime().reducer().in_flight(), 0);
    EXPECT_THROW(reads_no_weight.backward(), Error);
    stack.root().reset_iter_state();
    EXPECT_EQ(stack.root().unit()->runtime().reducer().in_flight(), 0);
    expect_equal(stack.gradients_of_step(), wanted);
    EXPECT_THROW(
        {
          stack.layer(1).forward(
              stack.layer(0).forward(subjects::data(rank(), round, {3, 6}))); // the third is on its way
          throw std::runtime_error("in the middle of forward");
        },
        std::runtime_error);
    stack.root().reset_iter_state();
    expect_equal(stack.gradients_of_step(), wanted);
  }
}

const MixedPrecisionPolicy kBFloat16{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};

Mesh hybrid_mesh() {
  return init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
}

class BrokenOff : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, BrokenOff, ::testing::Values(1, 2, 3, 4));

TEST_P(BrokenOff, StepsLeaveNoTrace) {
  on_threads(GetParam(), [] {
    break_off_and_go_on({});
    break_off_and_go_on({.mp_policy = kBFloat16});
  });
}

TEST(BrokenOffHybrid, StepsLeaveNoTrace) {
  on_threads(4, [] {
    break_off_and_go_on({.mesh = hybrid_mesh()});
    break_off_and_go_on({.mesh = hybrid_mesh(), .mp_policy = kBFloat16});
  });
}

TEST(BrokenOffProcesses, StepsLeaveNoTrace) {
  for (const char* backend : {"shm", "gloo"}) {
    on_processes(4, [&] {
      init({.backend = backend, .device = "cpu", .timeout = std::chrono::seconds(30)});
      break_off_and_go_on({});
      break_off_and_go_on({.mp_policy = kBFloat16});
      break_off_and_go_on({.mesh = hybrid_mesh()});
      barrier();
      shutdown();
    });
  }
}

TEST_P(BrokenOff, StepsKeepNoModel) {
  on_threads(GetParam(), [] {
    std::vector<std::weak_ptr<engine::Unit>> units;
    {
      Stack stack;
      stack.gradients_of_step();
      for (auto* unit : stack.root().unit()->runtime().units()) {
        units.push_back(unit->weak_from_this());
      }
      const auto loss = stack.loss(1, [] { throw std::runtime_error("in the middle of backward"); });
      EXPECT_THROW(loss.backward(), std::runtime_error);
      EXPECT_GT(stack.root().unit()->runtime().reducer().in_flight(), 0);
    }
    for (const auto& unit : units) {
      EXPECT_TRUE(unit.expired());
    }
  });
}

TEST_P(BrokenOff, AWriteInBackwardIsAnErrorAndChangesNothing) {
  on_threads(GetParam(), [] {
    Stack stack;
    const auto wanted = stack.gradients_of_step();
    for (const int layer : {0, 3}) { // before and after its gradient has come
      const auto loss = stack.loss(1, [&] {
        torch::NoGradGuard no_grad;
        stack.layer(layer).weight.zero_();
      });
      const auto said = error_message([&] { loss.backward(); });
      EXPECT_TRUE(contains(said, "weight' was written between the beginning of a forward and the end of its backward"));
      EXPECT_TRUE(contains(said, "reset_iter_state"));
      stack.root().reset_iter_state();
      expect_equal(stack.gradients_of_step(), wanted);
    }
  });
}

class Training : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Training, ::testing::Values(1, 2, 3));

// What is whole then was made under another mode, and is read again by the step.
TEST_P(Training, GoesOnAfterAForwardThatLeftTheRootWhole) {
  const Trial trial{
      .make = [] { return subjects::tied(); },
      .before_step =
          [](Subject& subject, FSDPModule& root, int) {
            {
              const c10::InferenceMode inference;
              subject.loss(rank(), 0);
            }
            EXPECT_EQ(root.unit()->state(), engine::UnitState::kWhole);
          }};
  expect_parity(trial, GetParam());
}

TEST_P(Training, FreezesBetweenForwardAndBackward) {
  on_threads(GetParam(), [] {
    for (const bool whole_layer : {false, true}) {
      Stack stack;
      auto& layer = stack.layer(1);
      const auto shards = whole_layer ? parameters(layer) : std::vector{parameters(layer)[0]};
      const auto set_trainable = [&](bool trainable) {
        for (auto shard : shards) {
          shard.set_requires_grad(trainable);
        }
      };
      std::vector<at::Tensor> gradients; // of the layer's weight and of the first layer's
      for (const bool trainable : {true, false, true}) {
        set_trainable(true);
        auto loss = stack.loss(0);
        set_trainable(trainable);
        loss.backward();
        EXPECT_EQ(sharded(shards[0]).full_grad().defined(), trainable);
        for (const auto& shard : {shards[0], parameters(stack.layer(0))[0]}) {
          gradients.push_back(sharded(shard).full_grad());
        }
        stack.forget_gradients();
      }
      EXPECT_TRUE(at::equal(gradients[0], gradients[4]));
      EXPECT_TRUE(at::equal(gradients[1], gradients[3]) && at::equal(gradients[1], gradients[5]));
    }
  });
}

// A frozen parameter has no gradient: nothing of it travels.
TEST_P(Training, ReducesTheBytesOfWhatIsTrained) {
  on_threads(GetParam(), [] {
    const auto group = std::make_shared<CountingGroup>(world());
    nn::Sequential model(nn::Linear(6, 5), nn::Linear(5, 4), nn::Linear(4, 3));
    model[0]->as<nn::Linear>()->weight.set_requires_grad(false);
    for (auto& parameter : model[1]->parameters()) {
      parameter.set_requires_grad(false);
    }
    for (const auto& layer : *model) {
      fully_shard(*layer.ptr(), {.mesh = Mesh::from_group(group, "shard")});
    }
    fully_shard(*model, {.mesh = Mesh::from_group(group, "shard")});
    for (int step = 1; step < 4; ++step) {
      model->forward(torch::ones({2, 6})).sum().backward();
      EXPECT_EQ(group->reduced_bytes, step * (5 + 4 * 3 + 3) * static_cast<int64_t>(sizeof(float)));
    }
    EXPECT_EQ(group->all_reduces, 0);
  });
}

} // namespace
} // namespace fsdp::testing
