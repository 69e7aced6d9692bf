// A copy of a sharded model is sharded as the original is, with shards of its own.

#include <atomic>
#include <thread>

#include "engine/bucket.h"
#include "engine/runtime.h"
#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class Clones : public ::testing::TestWithParam<int> {};

struct CopyableImpl : nn::Cloneable<CopyableImpl> {
  CopyableImpl() {
    CopyableImpl::reset();
  }
  void reset() override {
    first = register_module("first", nn::Linear(5, 4));
    second = register_module("second", nn::Linear(4, 3));
    uses = register_parameter("uses", torch::zeros({5}, torch::kLong), /*requires_grad=*/false);
    mean = register_buffer("mean", torch::zeros({2}));
    batches = register_buffer("batches", torch::zeros({}, torch::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    return second(torch::tanh(first(x)));
  }
  nn::Linear first{nullptr}, second{nullptr};
  at::Tensor uses, mean, batches;
};

TEST_P(Clones, HaveAsManyRootsAsTheOriginal) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model->first);
    fully_shard(*model->second);
    const auto copy = clone(*model);
    for (const auto& [path, parameter] : named_parameters(*copy)) {
      EXPECT_EQ(is_sharded(parameter), path != "uses") << path;
    }
  });
}

TEST_P(Clones, KeepAsManyReductionsInFlight) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model->first);
    fully_shard(*model).set_reduce_scatter_max_input_buffers(3, /*recurse=*/false);
    const auto copy = clone(*model);
    EXPECT_EQ(as_fsdp(*copy).unit()->runtime().reducer().max_in_flight(), 3);
  });
}

TEST_P(Clones, AreAShardedCopyWithItsOwnShards) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model->first);
    fully_shard(*model, {.reshard_after_forward = true});
    model->named_parameters()["first.bias"].set_requires_grad(false);
    auto copy = fsdp::clone(model);
    EXPECT_TRUE(is_fsdp(*copy->first));
    EXPECT_FALSE(copy->named_parameters()["first.bias"].requires_grad());
    EXPECT_EQ(describe(*copy).str(), describe(*model).str()); // unit by unit
    const auto x = torch::ones({2, 5});
    EXPECT_TRUE(torch::equal(copy->forward(x), model->forward(x)));
    {
      torch::NoGradGuard no_grad;
      for (auto& shard : model->parameters()) {
        shard.fill_(1);
      }
      for (auto& shard : copy->parameters()) {
        shard.fill_(0);
      }
      model->mean.fill_(1);
      model->batches.fill_(7);
    }
    ema_update_(*copy, *model, 0.75);
    EXPECT_TRUE(torch::equal(whole_of(*copy, "uses"), torch::ones({5}, torch::kLong))); // counts have no average
    EXPECT_TRUE(torch::equal(copy->mean, torch::ones({2})));
    EXPECT_EQ(copy->batches.item<int64_t>(), 7);
    EXPECT_TRUE(torch::equal(whole_of(*copy, "second.weight"), torch::full({3, 4}, 0.25)));
    EXPECT_TRUE(torch::equal(whole_of(*model, "second.weight"), torch::ones({3, 4})));
  });
}

TEST_P(Clones, TrainAsTheOriginal) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model->first);
    fully_shard(*model);
    const auto copy = fsdp::clone(model);
    const auto train = [](CopyableImpl& module) {
      torch::optim::AdamW optimizer(parameters(module), torch::optim::AdamWOptions(1e-2));
      std::vector<float> losses;
      for (int step = 0; step < 10; ++step) {
        optimizer.zero_grad();
        const auto loss = module.forward(subjects::data(rank(), step, {2, 5})).pow(2).mean();
        loss.backward();
        losses.push_back(loss.item<float>());
        optimizer.step();
      }
      return losses;
    };
    EXPECT_EQ(train(*copy), train(*model));
    for (const char* name : {"first.weight", "second.bias"}) {
      EXPECT_TRUE(torch::equal(whole_of(*copy, name), whole_of(*model, name))) << name;
    }
  });
}

TEST_P(Clones, ThatWereMadeInInferenceModeTrain) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model);
    std::shared_ptr<CopyableImpl> copy, built;
    {
      const c10::InferenceMode inference;
      copy = fsdp::clone(model);
      built = fsdp::clone(model, [] { return std::make_shared<CopyableImpl>(); });
      EXPECT_TRUE(c10::InferenceMode::is_enabled());
    }
    at::Tensor wanted;
    for (const auto& each : {model, copy, built}) {
      EXPECT_FALSE(each->mean.is_inference());
      for (const auto& shard : each->parameters()) {
        EXPECT_FALSE(shard.is_inference());
      }
      each->forward(torch::ones({2, 5})).sum().backward();
      const auto gradient = sharded(parameters(each->first)[0]).full_grad();
      wanted = wanted.defined() ? wanted : gradient;
      EXPECT_TRUE(torch::equal(gradient, wanted));
    }
  });
}

TEST_P(Clones, ExchangeAsTheOriginal) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    auto inner = fully_shard(*model->first);
    fully_shard(*model);
    int gathers = 0, reductions = 0;
    inner.set_custom_all_gather([&](at::Tensor& output, const at::Tensor& input, Group& group) {
      ++gathers;
      output.copy_(input.repeat({group.size()}));
    });
    inner.set_custom_reduce_scatter([&](at::Tensor& output, const at::Tensor& input, Group&) {
      ++reductions;
      output.copy_(input.narrow(0, 0, output.numel()));
    });
    const auto copy = fsdp::clone(model);
    gathers = reductions = 0;
    copy->forward(torch::ones({2, 5})).sum().backward();
    EXPECT_EQ(gathers, 1);
    EXPECT_EQ(reductions, 1);
  });
}

TEST_P(Clones, HaveReductionGroupsOfTheirOwnAsTheOriginalHas) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    auto inner = fully_shard(*model->first);
    fully_shard(*model);
    inner.set_separate_reduce_scatter_group();
    const auto copy = fsdp::clone(model);
    const auto is_apart = [](nn::Module& module) {
      const auto& bucket = *as_fsdp(module).unit()->buckets()[0];
      return bucket.reduce_group != bucket.gather_group;
    };
    EXPECT_TRUE(is_apart(*copy->first));
    EXPECT_FALSE(is_apart(*copy));
    EXPECT_NE(
        as_fsdp(*copy->first).unit()->buckets()[0]->reduce_group,
        as_fsdp(*model->first).unit()->buckets()[0]->gather_group);
  });
}

TEST_P(Clones, LeaveAloneWhatTheOriginalLeftAlone) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model->first, {.ignored_params = {model->first->bias}});
    fully_shard(*model, {.ignored_params = {model->second->bias}});
    auto copy = fsdp::clone(model);
    EXPECT_EQ(describe(*copy).str(), describe(*model).str());
    EXPECT_FALSE(is_sharded(copy->second->bias));
    ema_update_(*copy, *model, 0.5);
  });
}

/// Not Cloneable.
struct PlainImpl : nn::Module {
  explicit PlainImpl(int64_t width, bool tied = true) {
    first = register_module("first", nn::Linear(5, width));
    drop = register_module("drop", nn::Dropout(0.5));
    second = register_module("second", nn::Linear(width, 3));
    bias = register_parameter("bias", tied ? second->bias : torch::ones({3}));
    kept = register_parameter("kept", torch::randn({2}));
    mean = register_buffer("mean", torch::randn({2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return second(torch::tanh(first(x))) + bias * kept.sum();
  }
  nn::Linear first{nullptr}, second{nullptr};
  nn::Dropout drop{nullptr};
  at::Tensor bias, kept, mean;
};
TORCH_MODULE(Plain);

Plain sharded_plain() {
  Plain model(4);
  fully_shard(model->first, {.reshard_after_forward = true});
  fully_shard(model, {.ignored_params = {model->kept}});
  parameters(model->first)[1].set_requires_grad(false);
  model->drop->eval();
  return model;
}

TEST_P(Clones, OfWhatSomebodyElseHasBuilt) {
  on_threads(GetParam(), [] {
    Plain model = sharded_plain();
    Plain copy = fsdp::clone(model, [] { return Plain(4); });
    EXPECT_EQ(describe(copy).str(), describe(model).str());
    EXPECT_FALSE(parameters(copy->first)[1].requires_grad());
    EXPECT_FALSE(is_sharded(copy->kept));
    EXPECT_TRUE(torch::equal(copy->kept, model->kept));
    EXPECT_TRUE(torch::equal(copy->mean, model->mean));
    EXPECT_TRUE(copy->is_training());
    EXPECT_FALSE(copy->drop->is_training());
    const auto x = torch::ones({2, 5});
    EXPECT_TRUE(torch::equal(copy(x), model(x)));
    {
      const torch::NoGradGuard no_grad;
      for (auto& tensor : copy->parameters()) {
        tensor.fill_(7);
      }
      copy->mean.fill_(7);
    }
    EXPECT_FALSE(torch::equal(copy->kept, model->kept));
    EXPECT_FALSE(torch::equal(copy->mean, model->mean));
    EXPECT_FALSE(torch::equal(copy(x), model(x)));
    copy(x).sum().backward();
    EXPECT_TRUE(sharded(parameters(copy)[0]).full_grad().defined());
    auto other = fsdp::clone(model, [] { return std::make_shared<PlainImpl>(4); });
    EXPECT_TRUE(torch::equal(other->forward(x), model(x)));
  });
}

TEST_P(Clones, OfWhatWasBuiltOnTheMetaDeviceOrTheStack) {
  on_threads(GetParam(), [] {
    Plain model = sharded_plain();
    PlainImpl copy(4);
    for (auto& tensor : copy.parameters()) {
      engine::take_data(tensor, torch::empty_like(tensor, torch::kMeta));
    }
    clone_into(model, copy);
    const auto x = torch::ones({2, 5});
    EXPECT_TRUE(torch::equal(copy.forward(x), model(x)));
    ema_update_(copy, model, 0.5);
    CopyableImpl onstack;
    fully_shard(onstack);
    EXPECT_TRUE(is_fsdp(fsdp::clone(onstack)));
  });
}

TEST_P(Clones, OfWhatWasBuiltOtherwiseAreErrors) {
  on_threads(GetParam(), [] {
    Plain model = sharded_plain();
    const auto message = [&](const auto& build) { return error_message([&] { fsdp::clone(model, build); }); };
    EXPECT_TRUE(
        contains(message([] { return Plain(6); }), "'first.weight' has sizes [4, 5], got one where it has [6, 5]"));
    EXPECT_TRUE(contains(message([] { return nn::Linear(5, 4); }), "go on with 'first', got one where they end"));
    EXPECT_TRUE(contains(message([] { return Plain(4, /*tied=*/false); }), "'second.bias' does not: tie"));
    EXPECT_TRUE(contains(message([] { return sharded_plain(); }), "got one that is sharded"));
    EXPECT_TRUE(contains(
        message([] {
          Plain other(4);
          other->register_buffer("extra", torch::ones({1}));
          return other;
        }),
        "parameters and buffers end there, got one where they go on with 'extra'"));
    EXPECT_TRUE(torch::equal(model(torch::ones({2, 5})), model(torch::ones({2, 5})))); // nothing was broken
  });
}

TEST_P(Clones, AreNotMadeOfWhatIsShownWhole) {
  on_threads(GetParam(), [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model->first);
    {
      const auto guard = summon_full_params(*model);
      EXPECT_TRUE(contains(error_message([&] { fsdp::clone(model); }), "after the guard of summon_full_params"));
      EXPECT_TRUE(contains(
          error_message([&] { fsdp::clone(model, [] { return std::make_shared<CopyableImpl>(); }); }),
          "after the guard of summon_full_params"));
      EXPECT_TRUE(contains(error_message([&] { fully_shard(*model); }), "parameters of 'first', below it, are shown"));
    }
    fully_shard(*model);
    EXPECT_EQ(describe(*fsdp::clone(model)).str(), describe(*model).str());
  });
}

// Parameters of the modules of one unit may have the same names.
TEST_P(Clones, AreCutAsTheModelIsWhateverNamesRepeat) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::BatchNorm1d(4), nn::Linear(4, 4));
    FullyShardOptions options;
    options.shard_placement_fn = [](const at::Tensor& parameter, const std::string&) {
      return std::optional(ShardPlacement{.dim = parameter.dim() - 1});
    };
    fully_shard({model->ptr(0), model->ptr(1)}, options);
    auto copy = clone(model);
    const auto cuts = [](const nn::Sequential& of) {
      std::vector<std::vector<int64_t>> sizes;
      for (const auto& shard : parameters(of)) {
        sizes.push_back(shard.sizes().vec());
      }
      return sizes;
    };
    EXPECT_EQ(cuts(copy), cuts(model));
    model->eval(), copy->eval();
    EXPECT_TRUE(torch::equal(copy->forward(torch::ones({2, 4})), model->forward(torch::ones({2, 4}))));
  });
}

/// Its parts share their first layer. LibTorch clones each part by itself, so that the copy has two of it.
struct SharingImpl : nn::Cloneable<SharingImpl> {
  SharingImpl() {
    SharingImpl::reset();
  }
  void reset() override {
    one = register_module("one", std::make_shared<CopyableImpl>());
    other = register_module("other", std::make_shared<CopyableImpl>());
    other->first = other->replace_module("first", one->first);
  }
  at::Tensor forward(const at::Tensor& x) {
    return one->forward(x) + other->forward(x);
  }
  std::shared_ptr<CopyableImpl> one, other;
};

TEST_P(Clones, OfAModuleThatTwoUnitsShareAreShardedWhole) {
  on_threads(GetParam(), [] {
    const auto model = std::make_shared<SharingImpl>();
    fully_shard(*model->one);
    fully_shard(*model->other);
    const auto message = error_message([&] { fsdp::clone(model); });
    EXPECT_TRUE(contains(message, "'other.first.weight' is one tensor with a weight elsewhere")) << message;
    fully_shard(*model);
    const auto copy = fsdp::clone(model);
    for (const auto& [path, parameter] : named_parameters(*copy)) {
      EXPECT_TRUE(is_sharded(parameter)) << path;
    }
    const auto output = copy->forward(torch::full({2, 5}, static_cast<float>(rank() + 1)));
    EXPECT_TRUE(torch::equal(output, model->forward(torch::full({2, 5}, static_cast<float>(rank() + 1)))));
    output.sum().backward();
    for (const auto& parameter : parameters(*copy)) {
      EXPECT_TRUE(parameter.grad().defined() || parameter.numel() == 0 || !parameter.requires_grad());
    }
  });
}

TEST_P(Clones, OfAPartThatAModuleAboveHasShardedAreRefused) {
  on_threads(GetParam(), [] {
    const auto model = std::make_shared<SharingImpl>();
    fully_shard(*model->one->second);
    fully_shard(*model);
    const auto message = error_message([&] { fsdp::clone(model->one); });
    EXPECT_TRUE(contains(message, "belongs to a unit of modules outside of this one")) << message;
    nn::Linear copy = fsdp::clone(model->one->second);
    const auto x = torch::ones({2, 4});
    EXPECT_TRUE(torch::equal(copy->forward(x), model->one->second->forward(x)));
  });
}

TEST(ClonesOfOneRank, AreReadByAnotherThreadWhileTheModelTrains) {
  on_threads(1, [] {
    auto model = std::make_shared<CopyableImpl>();
    fully_shard(*model->first);
    fully_shard(*model);
    const auto copy = fsdp::clone(model);
    const auto x = torch::ones({2, 5});
    const auto infer = [&] {
      const torch::NoGradGuard no_grad;
      return copy->forward(x);
    };
    const auto expected = infer();
    std::atomic<bool> trains = true;
    std::thread reader([&] {
      while (trains) {
        EXPECT_NO_THROW(EXPECT_TRUE(torch::equal(infer(), expected)));
      }
    });
    torch::optim::SGD optimizer(model->parameters(), 0.01);
    for (int step = 0; step < 200; ++step) {
      optimizer.zero_grad();
      model->forward(x).sum().backward();
      optimizer.step();
    }
    trains = false;
    reader.join();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Clones, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
