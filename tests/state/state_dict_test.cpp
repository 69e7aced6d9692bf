// Whole values by name: the same from whatever sharding, and into any.

#include <algorithm>

#include "engine/unit.h"
#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

/// Ties, a buffer, 0-dim and odd sizes, a parameter that stays unsharded.
struct NetImpl : nn::Module {
  explicit NetImpl(double begin = 0) {
    first = register_module("first", nn::Linear(5, 7));
    norm = register_module("norm", nn::BatchNorm1d(7));
    last = register_module("last", nn::Linear(7, 5));
    scale = register_parameter("scale", torch::zeros({}));
    own = register_parameter("own", torch::zeros({3}));
    tied = register_parameter("tied", last->bias);
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      parameter.copy_(torch::arange(parameter.numel()).view(parameter.sizes()) + (begin += 100));
    }
    norm->running_mean.fill_(begin + 0.5);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last(norm(first(x))) * scale + own.sum();
  }
  nn::Linear first = nullptr, last = nullptr;
  nn::BatchNorm1d norm = nullptr;
  torch::Tensor scale, own, tied;
};
TORCH_MODULE(Net);

enum class Cut { kNot, kAlongDimensions, kFlat };

void shard(Net& net, Cut cut, FullyShardOptions options = {}) {
  options.ignored_params = {net->own};
  const auto flat = cut == Cut::kFlat ? std::optional(fsdp::nn::FlatCut{16}) : std::nullopt;
  if (cut != Cut::kNot) {
    fsdp::nn::make_unit({net->first.get()}, options, flat);
    fsdp::nn::make_unit({net.get()}, options, flat);
  }
}

void expect_equal(const StateDict& got, const StateDict& wanted) {
  ASSERT_EQ(got.keys(), wanted.keys());
  for (const auto& item : wanted) {
    expect_same(got[item.key()], item.value(), item.key());
  }
}

class StateDicts : public ::testing::TestWithParam<int> {};

TEST_P(StateDicts, AreTheSameFromWhateverShardingAndGoIntoAny) {
  on_threads(GetParam(), [] {
    Net unsharded(1000);
    const auto wanted = full_state_dict(unsharded);
    EXPECT_EQ(wanted.keys().front(), "scale");
    EXPECT_TRUE(wanted.contains("norm.running_mean"));
    EXPECT_TRUE(wanted.contains("tied") && wanted.contains("last.bias"));
    for (const auto from : {Cut::kNot, Cut::kAlongDimensions, Cut::kFlat}) {
      Net net(1000);
      shard(net, from);
      const auto state = full_state_dict(net);
      expect_equal(state, wanted);
      for (const auto into : {Cut::kNot, Cut::kAlongDimensions, Cut::kFlat}) {
        Net other;
        shard(other, into);
        const auto keys = load_state_dict(other, state);
        EXPECT_TRUE(keys.missing.empty() && keys.unexpected.empty());
        expect_equal(full_state_dict(other), wanted);
      }
    }
  });
}

TEST_P(StateDicts, AreCopiesOfWhatIsTrained) {
  on_threads(GetParam(), [] {
    Net net(1000);
    FullyShardOptions options;
    options.mp_policy.param_dtype = torch::kBFloat16;
    options.offload_policy = CPUOffloadPolicy{};
    shard(net, Cut::kAlongDimensions, options);
    {
      torch::NoGradGuard no_grad;
      net->first->weight.fill_(3); // through a member, and not in the shards yet
    }
    const auto state = full_state_dict(net);
    EXPECT_EQ(state["first.weight"].scalar_type(), torch::kFloat);
    EXPECT_TRUE(state["first.weight"].equal(torch::full({7, 5}, 3.0)));
    EXPECT_EQ(state["last.weight"][0][1].item<float>(), Net(1000)->last->weight[0][1].item<float>()) << "no bfloat16";
    const auto kept = state["last.weight"].clone(), mean = state["norm.running_mean"].clone();
    torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) {
      parameter.mul_(2);
    }
    net->norm->running_mean.mul_(2);
    EXPECT_TRUE(state["last.weight"].equal(kept));
    EXPECT_TRUE(state["norm.running_mean"].equal(mean));
  });
}

// As the guide shows it; Python's `torch.load` reads it too.
TEST(StateDictsInFiles, ArePickledAsDictionaries) {
  c10::Dict<std::string, at::Tensor> values;
  for (const auto& item : full_state_dict(Net(1000))) {
    values.insert(item.key(), item.value());
  }
  const std::vector<char> bytes = torch::pickle_save(values);
  StateDict state;
  for (const auto& item : torch::pickle_load(bytes).toGenericDict()) {
    state.insert(item.key().toStringRef(), item.value().toTensor());
  }
  Net other;
  load_state_dict(other, state);
  expect_equal(full_state_dict(other), full_state_dict(Net(1000)));
}

TEST_P(StateDicts, MayBeOfTheFirstRankAlone) {
  on_threads(GetParam(), [] {
    Net net(1000);
    shard(net, Cut::kAlongDimensions);
    const auto state = full_state_dict(net, {.rank0_only = true, .offload_to_cpu = true});
    EXPECT_EQ(state.is_empty(), rank() != 0);
    Net other;
    shard(other, Cut::kFlat);
    load_state_dict(other, state, {.broadcast_from_rank0 = true});
    expect_equal(full_state_dict(other), full_state_dict(Net(1000)));
  });
}

TEST(HybridStateDicts, GoFromTheFirstRankToAllReplicas) {
  on_threads(4, [] {
    FullyShardOptions options;
    options.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    Net net(1000), other;
    shard(net, Cut::kAlongDimensions, options);
    shard(other, Cut::kAlongDimensions, options);
    const auto state = full_state_dict(net, {.rank0_only = true});
    EXPECT_EQ(state.is_empty(), rank() != 0);
    load_state_dict(other, state, {.broadcast_from_rank0 = true});
    expect_equal(full_state_dict(other), full_state_dict(Net(1000)));
  });
}

TEST_P(StateDicts, OfAnotherModelAreAnErrorThatWritesNothing) {
  on_threads(GetParam(), [] {
    for (const bool broadcast : {false, true}) {
      Net net(1000);
      shard(net, Cut::kAlongDimensions);
      StateDict state;
      if (!broadcast || rank() == 0) {
        for (const auto& item : full_state_dict(Net(5000))) {
          if (item.key() != "first.bias" && item.key() != "norm.running_var") {
            state.insert(item.key(), item.value());
          }
        }
        state["own"] = torch::ones({4});
        state.insert("extra", torch::ones({1}));
      }
      const LoadStateDictOptions options{.broadcast_from_rank0 = broadcast};
      const auto message = error_message([&] { load_state_dict(net, state, options); });
      EXPECT_TRUE(contains(message, "missing: first.bias, norm.running_var")) << message;
      EXPECT_TRUE(contains(message, "unexpected: extra")) << message;
      EXPECT_TRUE(contains(message, "'own' has sizes [3] in the model and [4] there")) << message;
      expect_equal(full_state_dict(net), full_state_dict(Net(1000)));
    }
  });
}

TEST_P(StateDicts, WithoutValuesAreAnErrorThatWritesNothing) {
  on_threads(GetParam(), [] {
    for (const bool broadcast : {false, true}) {
      for (const bool sparse : {false, true}) {
        Net net(1000);
        shard(net, Cut::kAlongDimensions);
        StateDict state;
        if (!broadcast || rank() == 0) {
          state = full_state_dict(Net(5000));
          state["tied"] = sparse ? state["tied"].to_sparse() : state["tied"].to(torch::kMeta);
        }
        const LoadStateDictOptions options{.broadcast_from_rank0 = broadcast};
        const auto message = error_message([&] { load_state_dict(net, state, options); });
        EXPECT_TRUE(contains(message, "'tied' is no dense tensor with values")) << message;
        expect_equal(full_state_dict(net), full_state_dict(Net(1000)));
      }
    }
  });
}

TEST_P(StateDicts, GoIntoBuffersThatWereExpanded) {
  on_threads(GetParam(), [] {
    const auto expanded = [](double value) {
      Net net;
      net->register_buffer("mask", torch::full({1, 4}, value).expand({4, 4}));
      return net;
    };
    Net net = expanded(1), other = expanded(2);
    shard(net, Cut::kAlongDimensions);
    shard(other, Cut::kAlongDimensions);
    load_state_dict(net, full_state_dict(other));
    EXPECT_TRUE(net->named_buffers()["mask"].equal(torch::full({4, 4}, 2.0)));
    load_state_dict(other, sharded_state_dict(net));
    EXPECT_TRUE(other->named_buffers()["mask"].equal(torch::full({4, 4}, 2.0)));
  });
}

TEST_P(StateDicts, NeedNotBeCompleteUnlessStrict) {
  on_threads(GetParam(), [] {
    for (const bool broadcast : {false, true}) {
      Net net(1000);
      shard(net, Cut::kAlongDimensions);
      StateDict state;
      if (!broadcast || rank() == 0) {
        state.insert("first.weight", torch::full({7, 5}, 2.0));
        state.insert("extra", torch::ones({1}));
      }
      const auto keys = load_state_dict(net, state, {.strict = false, .broadcast_from_rank0 = broadcast});
      EXPECT_EQ(keys.unexpected, std::vector<std::string>{"extra"});
      EXPECT_EQ(keys.missing.size(), full_state_dict(Net()).size() - 1);
      const auto loaded = full_state_dict(net), before = full_state_dict(Net(1000));
      EXPECT_TRUE(loaded["first.weight"].equal(torch::full({7, 5}, 2.0)));
      EXPECT_TRUE(loaded["last.weight"].equal(before["last.weight"]));
    }
  });
}

TEST_P(StateDicts, GiveAModelItsTraining) {
  on_threads(GetParam(), [] {
    const auto step = [](Net& net) {
      torch::optim::SGD optimizer(parameters(*net), torch::optim::SGDOptions(1e-4));
      net->forward(subjects::data(rank(), 0, {4, 5})).mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    Net net(10), other;
    shard(net, Cut::kAlongDimensions);
    shard(other, Cut::kFlat);
    step(net);
    load_state_dict(other, full_state_dict(net));
    step(net);
    step(other);
    const auto ours = full_state_dict(net), theirs = full_state_dict(other);
    for (const auto& item : ours) {
      if (item.key() != "own" && item.key().find("running") == std::string::npos) { // each rank's own
        expect_same(item.value(), theirs[item.key()], item.key());
      }
    }
  });
}

TEST(StateDictsErrors, SayWhatToDo) {
  on_threads(2, [] {
    Net net;
    shard(net, Cut::kAlongDimensions);
    auto guard = summon_full_params(net);
    EXPECT_TRUE(contains(error_message([&] { full_state_dict(net); }), "end that guard first"));
    EXPECT_TRUE(contains(error_message([&] { load_state_dict(net, StateDict()); }), "end that guard first"));
  });
  on_threads(2, [] {
    nn::Linear first(4, 4), head(nn::LinearOptions(4, 4).bias(false));
    nn::Sequential model(first, head);
    fully_shard(*head);
    fully_shard(*model);
    head->weight = first->weight; // what nobody reads any more ends
    EXPECT_TRUE(
        contains(error_message([&] { full_state_dict(model); }), "'1.weight' is this rank's piece of a parameter"));
  });
  on_threads(2, [] {
    nn::Linear model(nn::LinearOptions(4, 4));
    move_to_meta(*model);
    fully_shard(model);
    StateDict state;
    state.insert("weight", torch::ones({4, 4}));
    state.insert("bias", torch::ones({4}));
    EXPECT_TRUE(contains(error_message([&] { load_state_dict(model, state); }), "call fsdp::to_empty(model) first"));
    to_empty(model);
    load_state_dict(model, state);
    EXPECT_TRUE(full_state_dict(model)["weight"].equal(torch::ones({4, 4})));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, StateDicts, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

} // namespace
} // namespace fsdp::testing
