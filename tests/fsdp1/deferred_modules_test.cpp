// FullyShardedDataParallel of modules whose parameters are recorded.

#include "fsdp1/train.h"

namespace fsdp::testing {
namespace {

Trial deferred_trial() {
  return {.make = [] { return subjects::tied(); }, .steps = 3, .deferred = true};
}

class DeferredModules : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DeferredModules, ::testing::Values(1, 2, 3, 4));

TEST_P(DeferredModules, TrainAsThoseThatHadTheirValues) {
  for (const bool original : {false, true}) {
    for (const bool by_policy : {false, true}) {
      SCOPED_TRACE(::testing::Message() << original << by_policy);
      Trial trial = deferred_trial();
      trial.flat = fsdp::nn::FlatCut{};
      const auto reference = train_unsharded(trial, {GetParam()});
      on_threads(GetParam(), [&] {
        train_wrapped(trial, reference, [&](Subject& subject) {
          FSDPOptions options{.use_orig_params = original};
          if (by_policy) {
            options.auto_wrap_policy = ModuleWrapPolicy::of<subjects::Block>();
          }
          const auto instance = fsdp::detail::wrap_module(*subject.module, options);
          EXPECT_FALSE(is_deferred(*subject.module));
          return instance.unit();
        });
      });
    }
  }
}

TEST(DeferredModules, OfWhichSomeAreIgnored) {
  on_threads(2, [] {
    auto model =
        deferred_init([] { return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4)); });
    const FullyShardedDataParallel<torch::nn::Sequential> wrapped(
        model, {.ignored_modules = {*model[1]}, .device_id = c10::Device(c10::kCPU)});
    EXPECT_FALSE(is_deferred(model));
    EXPECT_TRUE(model[1]->parameters()[0].equal(torch::ones({4})));
  });
}

struct WrappedAsItIsMadeImpl : torch::nn::Module {
  WrappedAsItIsMadeImpl()
      : first(register_module("first", wrap(torch::nn::Linear(4, 4)))),
        second(register_module("second", torch::nn::Linear(4, 4))) {}
  at::Tensor forward(const at::Tensor& x) {
    return second(first(x));
  }
  torch::nn::Linear first, second;
};
TORCH_MODULE(WrappedAsItIsMade);

TEST(DeferredModules, MayBeWrappedAsTheyAreMade) {
  on_processes(2, [] {
    init({.device = "cpu"});
    torch::manual_seed(3);
    const torch::nn::Linear first(4, 4), second(4, 4); // made in this order
    torch::nn::Sequential ordinary(first, second);
    torch::manual_seed(3);
    const auto guard = enable_wrap();
    auto model = deferred_init([] { return WrappedAsItIsMade(); });
    EXPECT_FALSE(is_deferred(model->first));
    EXPECT_TRUE(is_deferred(model->second));
    FullyShardedDataParallel<WrappedAsItIsMade> wrapped(model);
    EXPECT_TRUE(wrapped(torch::ones({1, 4})).equal(ordinary->forward(torch::ones({1, 4}))));
    shutdown();
  });
}

} // namespace
} // namespace fsdp::testing
