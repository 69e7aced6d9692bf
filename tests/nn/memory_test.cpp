// The bound on memory, as the engine counts it and as storages show it.

#include <optional>
#include <thread>

#include "engine/prediction.h"
#include "nn/watched.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class MemoryBound : public ::testing::TestWithParam<int> {};

// At every event: at most two passing units and the prefetched one are whole besides those that stay, and at most one
// reduction is in flight.
TEST_P(MemoryBound, HoldsAtEveryEvent) {
  for (int prefetch : {0, 1, 2}) {
    for (bool checkpointed : {false, true}) {
      on_threads(GetParam(), [&] {
        Stack stack({.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
        stack.watched->root().unit()->runtime().set_prefetch(prefetch);
        const auto x = torch::ones({2, 4}).requires_grad_();
        const int64_t unit_bytes = (16 + 4) * 2, unit_gradient = (16 + 4) * 4;
        for (int step = 0; step < 4; ++step) {
          stack.step([&] { stack.module->forward(x, checkpointed).backward(); });
          for (const auto& event : stack.watched->events()) {
            EXPECT_LE(event.whole_units, 1 + 2 + prefetch);
            // The memory of a cast gather is shared by the ranks, and pieces are aligned to 64 bytes.
            EXPECT_LE(event.whole_bytes, (1 + 2 + prefetch) * (unit_bytes + 2 * 64));
            EXPECT_LE(event.reducing, 1);
            EXPECT_LE(event.gradient_bytes, 2 * unit_gradient + 4 * 4); // with the root's own
          }
          EXPECT_EQ(stack.watched->events().back().whole_units, 0);
          EXPECT_EQ(stack.watched->events().back().whole_bytes, 0);
          EXPECT_EQ(stack.watched->events().back().gradient_bytes, 0);
        }
      });
    }
  }
}

TEST_P(MemoryBound, GatheringInPlaceCostsNothing) {
  on_threads(GetParam(), [] {
    Stack stack;
    stack.step([&] { stack.module->forward(torch::ones({2, 4})).backward(); });
    for (const auto& event : stack.watched->events()) {
      EXPECT_EQ(event.whole_bytes, 0);
    }
  });
}

// Where gathers copy: the bytes that the engine counts stay within what `describe` predicts.
void expect_within_prediction(const FullyShardOptions& options, size_t prefetch, int64_t width) {
  Stack stack(options, width);
  auto& runtime = stack.watched->root().unit()->runtime();
  runtime.set_prefetch(prefetch);
  const auto x = torch::ones({2, width}).requires_grad_();
  const int64_t predicted = engine::prediction::passing_bytes(runtime.units());
  int64_t most = 0;
  for (int step = 0; step < 3; ++step) {
    stack.step([&] { stack.module->forward(x).backward(); });
    for (const auto& event : stack.watched->events()) {
      most = std::max(most, event.whole_bytes + event.gradient_bytes);
    }
    EXPECT_EQ(stack.watched->events().back().whole_bytes, 0);
  }
  EXPECT_LE(most, predicted);
  EXPECT_GE(2 * most, predicted) << "a bound that says little";
}

TEST(MemoryOverGloo, StaysWithinThePrediction) {
  on_processes(4, [] {
    init({.backend = "gloo", .device = "cpu"});
    for (const auto& reshard : {ReshardAfterForward(true), ReshardAfterForward(false), ReshardAfterForward(2)}) {
      for (const bool bf16 : {false, true}) {
        for (const size_t prefetch : {0, 1, 2}) {
          SCOPED_TRACE(::testing::Message() << reshard.ranks().value_or(0) << " " << bf16 << " " << prefetch);
          FullyShardOptions options{.reshard_after_forward = reshard};
          if (bf16) {
            options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
          }
          expect_within_prediction(options, prefetch, /*width=*/64);
        }
      }
    }
    shutdown();
  });
}

// Between forward and backward the ranks that a unit was given to keep it in equal shares, and nobody keeps the whole.
TEST(MemoryOverGloo, OfAUnitReshardedAmongSomeRanksEachKeepsAShare) {
  on_processes(4, [] {
    init({.backend = "gloo", .device = "cpu"});
    for (const int among : {1, 2, 4}) {
      const Stack stack({.reshard_after_forward = among}, /*width=*/16);
      const auto loss = stack.module->forward(torch::ones({2, 16}).requires_grad_());
      for (const int layer : {0, 1}) { // the last two stay for backward, which comes to them first
        const auto unit = as_fsdp(*stack.module->layers[layer]).unit();
        const int64_t whole = unit->predicted_whole_bytes();
        EXPECT_EQ(unit->whole_bytes(), among == 4 ? 0 : whole / among) << layer << " among " << among;
      }
      loss.backward();
      for (auto& layer : stack.module->layers) {
        EXPECT_EQ(as_fsdp(*layer).unit()->whole_bytes(), 0);
        as_fsdp(*layer).set_reshard_after_forward(true, /*recurse=*/false);
      }
      const auto among_all = stack.module->forward(torch::ones({2, 16}).requires_grad_());
      EXPECT_EQ(as_fsdp(*stack.module->layers[0]).unit()->whole_bytes(), 0) << "no share any more, among " << among;
      among_all.backward();
    }
    shutdown();
  });
}

// Rank 1 is slow to read the others' gradients, which have to live until then.
TEST(MemoryOfGradients, ThatASlowRankHasNotReadIsBounded) {
  on_threads(2, [] {
    nn::Sequential model;
    for (int i = 0; i < 16; ++i) {
      model->push_back(nn::Linear(nn::LinearOptions(8, 8).bias(false)));
      fully_shard(*model[i]);
    }
    auto root = fully_shard(*model);
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> gradients; // alive
    size_t most = 0;
    for (const auto& layer : *model) {
      layer.ptr()->as<nn::Linear>()->weight.register_hook([&](const at::Tensor& gradient) {
        if (rank() == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        std::erase_if(gradients, [](const auto& weak) { return weak.expired(); });
        gradients.push_back(gradient.storage().getWeakStorageImpl());
        most = std::max(most, gradients.size());
      });
    }
    model->forward(torch::ones({2, 8})).sum().backward();
    const auto in_flight = static_cast<size_t>(root.unit()->runtime().reducer().max_in_flight());
    EXPECT_LE(most, 1 + in_flight) << "on rank " << rank();
    EXPECT_GT(most, rank() == 0 ? in_flight : 0);
  });
}

// The root's head brings its gradient first, which waits for the embedding's; of the layers two have theirs at a time.
TEST(MemoryOfGradients, OfTheUnitsAroundCountsToo) {
  on_threads(2, [] {
    nn::Sequential model;
    for (int i = 0; i < 6; ++i) {
      model->push_back(nn::Linear(nn::LinearOptions(64, 64).bias(false)));
    }
    for (const size_t layer : {1, 2, 3, 4}) {
      fully_shard(*model[layer]);
    }
    auto root = fully_shard(*model);
    std::vector<std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, int64_t>> gradients;
    int64_t most = 0;
    for (const auto& layer : *model) {
      layer.ptr()->as<nn::Linear>()->weight.register_hook([&](const at::Tensor& gradient) {
        gradients.emplace_back(gradient.storage().getWeakStorageImpl(), static_cast<int64_t>(gradient.nbytes()));
        int64_t alive = 0;
        for (const auto& [storage, bytes] : gradients) {
          alive += storage.expired() ? 0 : bytes;
        }
        most = std::max(most, alive);
      });
    }
    model->forward(torch::ones({2, 64})).sum().backward();
    const int64_t bytes = int64_t{64} * 64 * 4;
    EXPECT_EQ(most, 3 * bytes) << "the head's, the layer's, and one that is reduced";
    EXPECT_EQ(engine::prediction::passing_bytes(root.unit()->runtime().units()), 4 * bytes);
  });
}

// At the same moment of each step, that is, however slow the others are: so memory comes and goes in one order.
TEST(MemoryOfGradients, GoesWhenTheNextUnitIsReduced) {
  on_threads(3, [] {
    nn::Sequential model;
    for (int i = 0; i < 4; ++i) {
      model->push_back(nn::Linear(nn::LinearOptions(8, 8).bias(false)));
    }
    fully_shard(*model[3]);
    fully_shard(*model[2]);
    fully_shard(*model);
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> of_last;
    std::vector<bool> gone;
    const auto at_gradient_of = [&](size_t i, const std::function<void(const at::Tensor&)>& act) {
      model[i]->as<nn::Linear>()->weight.register_hook([act](const at::Tensor& gradient) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10 * rank()));
        act(gradient);
      });
    };
    at_gradient_of(3, [&](const at::Tensor& gradient) { of_last = gradient.storage().getWeakStorageImpl(); });
    at_gradient_of(2, [&](const at::Tensor&) { gone.push_back(of_last->expired()); });
    at_gradient_of(1, [&](const at::Tensor&) { gone.push_back(of_last->expired()); });
    model->forward(torch::ones({2, 8})).sum().backward();
    EXPECT_EQ(gone, (std::vector<bool>{false, true})) << "on rank " << rank();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, MemoryBound, ::testing::Values(1, 2, 3, 4));

TEST(OneRank, GradientsAreThoseOfAutograd) {
  on_threads(1, [] {
    nn::Linear model(nn::LinearOptions(4, 4).bias(false));
    fully_shard(*model);
    const void* came = nullptr;
    model->weight.register_hook([&](const at::Tensor& gradient) { came = gradient.const_data_ptr(); });
    (model->weight * torch::full({4, 4}, 2.0)).sum().backward();
    EXPECT_EQ(model->parameters()[0].grad().const_data_ptr(), came);
  });
}

} // namespace
} // namespace fsdp::testing
