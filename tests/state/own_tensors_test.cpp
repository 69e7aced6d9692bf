// What a rank has by itself may be wrong on that rank alone; no rank is to wait for it.

#include "base/phrase.h"
#include "nn/parity.h"
#include "state/training.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

/// Each rank trains `own` by itself: of three elements, of four on rank 1.
struct WithOwnImpl : torch::nn::Module {
  at::Tensor forward() {
    return linear->weight.sum() + own.sum();
  }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(4, 4));
  at::Tensor own = register_parameter("own", torch::ones({rank() == 1 ? 4 : 3}));
};
TORCH_MODULE(WithOwn);

WithOwn sharded_with_own() {
  WithOwn net;
  fully_shard(net, {.ignored_params = {net->own}});
  return net;
}

TEST(OwnTensors, OfAnotherSizeThanTheFirstRanksAreAnErrorOnAll) {
  on_threads(3, [] {
    WithOwn net = sharded_with_own();
    const auto state = full_state_dict(net, {.rank0_only = true});
    const auto message = error_message([&] { load_state_dict(net, state, {.broadcast_from_rank0 = true}); });
    EXPECT_TRUE(contains(message, "the first rank's model has 'own' of float with sizes [3]")) << message;
    EXPECT_TRUE(contains(message, "another's has 'own' of float with sizes [4]")) << message;
  });
}

TEST(OwnTensors, WhoseOptimizersStateHasAnotherSizeAreAnErrorOnAll) {
  on_threads(3, [] {
    WithOwn net = sharded_with_own();
    torch::optim::Adam optimizer(net->parameters(), 0.1);
    net->forward().backward();
    optimizer.step();
    const auto state = full_optim_state_dict(net, optimizer, {.rank0_only = true});
    const auto message =
        error_message([&] { load_optim_state_dict(net, optimizer, state, {.broadcast_from_rank0 = true}); });
    EXPECT_TRUE(contains(message, "'own' has sizes [4] in the model")) << message;
  });
}

// With none left its elements would be zeros.
TEST(OwnTensors, PiecesOfOtherSizesThanTheirPlacesAreAnErrorOnAll) {
  on_threads(3, [] {
    Training rows(Form::kRows, Kind::kAdam, 10), flat(Form::kFlat, Kind::kAdam, 10);
    rows.steps(0, 1, Form::kRows);
    for (const char* name : {"first.weight", "own"}) {
      for (const int left : {1, 0}) {
        auto pieces = sharded_optim_state_dict(rows.net, *rows.optimizer);
        if (rank() == 1) {
          at::Tensor& local = pieces.state[name].tensors.at("exp_avg").local;
          local = local.narrow(0, 0, left);
        }
        const auto message =
            error_message([&] { flatten_sharded_optim_state_dict(flat.net, *flat.optimizer, pieces); });
        EXPECT_TRUE(contains(message, phrase("'exp_avg' of '{}' has ", name))) << message;
        EXPECT_TRUE(contains(message, "elements where its place has")) << message;
      }
    }
  });
}

} // namespace
} // namespace fsdp::testing
