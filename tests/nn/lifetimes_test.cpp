// Models and their units may go at any time: when a program lets go of them, not when the engine expects it.

#include "nn/parity.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

// The hook's is the last reference: its reduction was left running by a backward whose graph is gone.
TEST(Lifetimes, AModelGoesWhileItsGradientsAreDelivered) {
  on_threads(1, [] {
    auto leaving = std::make_shared<nn::Sequential>(nn::Linear(4, 4), nn::Linear(4, 4));
    nn::Sequential staying(nn::Linear(4, 4));
    auto root = fully_shard(**leaving);
    auto other = fully_shard(*staying);
    share_comm_ctx({root, other});
    root.set_all_reduce_hook([&](at::Tensor&) { leaving = nullptr; });
    root.set_is_last_backward(false);
    (*leaving)->forward(torch::ones({2, 4})).sum().backward();
    root = other;
    other.set_is_last_backward(true);
    staying->forward(torch::ones({2, 4})).sum().backward();
    EXPECT_EQ(leaving, nullptr);
    EXPECT_TRUE(parameters(*staying)[0].grad().defined());
  });
}

} // namespace
} // namespace fsdp::testing
