// What would let ranks drift apart without a word: modules exchanged after fully_shard, other seeds, what is not
// sharded.

#include "nn/parity.h"
#include "nn/subjects.h"
#include "support/error_message.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

struct NetImpl : nn::Module {
  NetImpl() {
    body = register_module("body", nn::Linear(4, 4));
    norm = register_module("norm", nn::BatchNorm1d(4));
    head = register_module("head", nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    return head(norm(body(x)));
  }
  void exchange_head() {
    head = replace_module("head", nn::Linear(4, 4));
  }
  nn::Linear body{nullptr}, head{nullptr};
  nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

class Drift : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Drift, ::testing::Values(1, 2, 3));

TEST_P(Drift, AModuleThatWasExchangedIsRefused) {
  on_threads(GetParam(), [] {
    Net model;
    fully_shard(*model->body);
    fully_shard(*model);
    const auto x = torch::ones({2, 4});
    const std::vector<std::pair<std::string, std::function<void()>>> uses = {
        {"parameters", [&] { parameters(*model); }},
        {"describe", [&] { describe(*model); }},
        {"summon_full_params", [&] { const auto guard = summon_full_params(*model); }},
        {"call", [&] { call(model, x); }}};
    for (const auto& [operation, use] : uses) {
      EXPECT_NO_THROW(use()) << operation;
    }
    model->zero_grad();
    as_fsdp(*model).reset_iter_state();
    model->exchange_head();
    for (const auto& [operation, use] : uses) {
      const auto said = error_message(use);
      EXPECT_EQ(said.find("[" + operation + "] 'head.weight' was registered below a sharded module"), 0) << said;
    }
    model->head->weight.set_requires_grad(false);
    EXPECT_TRUE(contains(error_message(uses[0].second), "'head.bias'"));
    fully_shard(*model->head);
    for (const auto& [operation, use] : uses) {
      EXPECT_NO_THROW(use()) << operation;
    }
  });
}

// Memory is used again.
TEST_P(Drift, WhatComesToLieWhereAnIgnoredParameterLayIsAStranger) {
  on_threads(GetParam(), [] {
    Net model;
    fully_shard(*model, {.ignored_params = model->head->parameters()});
    const auto* ignored = model->head->weight.unsafeGetTensorImpl();
    model->exchange_head();
    for (auto& parameter : model->head->parameters()) {
      parameter.set_requires_grad(false);
    }
    std::vector<at::Tensor> others;
    while (others.empty() || (others.back().unsafeGetTensorImpl() != ignored && others.size() < 1000)) {
      others.push_back(torch::ones({2}));
    }
    model->head->register_parameter("late", others.back());
    const auto said = error_message([&] { parameters(*model); });
    EXPECT_TRUE(contains(said, "'head.late' was registered below a sharded module")) << said;
  });
}

TEST_P(Drift, WhatIsIgnoredOrShownWholeIsNoStranger) {
  on_threads(GetParam(), [] {
    Net model;
    fully_shard(*model, {.ignored_params = model->head->parameters()});
    EXPECT_EQ(parameters(*model).size(), 6);
    for (const bool with_grads : {false, true}) {
      const auto guard = summon_full_params(*model, {.with_grads = with_grads});
      EXPECT_EQ(parameters(*model).size(), 6);
    }
    EXPECT_FALSE(is_sharded(model->head->weight));
  });
}

void fill(const nn::Module& model, double value) {
  torch::NoGradGuard no_grad;
  for (auto& parameter : model.parameters()) {
    parameter.fill_(value);
  }
  for (auto& buffer : model.buffers()) {
    buffer.fill_(value);
  }
}

/// What this process writes meanwhile.
std::string written_by(const std::function<void()>& action) {
  ::testing::internal::CaptureStderr();
  action();
  return ::testing::internal::GetCapturedStderr();
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++found;
  }
  return found;
}

void with_processes(const std::string& backend, int ranks, const std::function<void()>& body) {
  on_processes(ranks, [&] {
    init({.backend = backend, .device = "cpu", .timeout = std::chrono::seconds(60)});
    body();
    barrier();
    shutdown();
  });
}

TEST(Drift, OtherSeedsAreToldOnce) {
  for (const char* backend : {"shm", "gloo"}) {
    with_processes(backend, 3, [] {
      const auto shard = [](int64_t seed) {
        torch::manual_seed(seed);
        nn::Sequential model(nn::Linear(4, 4), nn::LayerNorm(nn::LayerNormOptions({4})), nn::Linear(4, 4));
        fully_shard(*model[2]);
        fully_shard(*model);
      };
      EXPECT_EQ(written_by([&] { shard(1); }), "");
      const std::string written = written_by([&] { shard(rank() == 2 ? 7 : 1); });
      EXPECT_EQ(count(written, "warning"), rank() == 0 ? 1 : 0) << written;
      if (rank() == 0) {
        EXPECT_TRUE(contains(written, "rank 0 and rank 2 give 'weight' different values"));
        EXPECT_TRUE(contains(written, "sync_module_states"));
      }
    });
  }
}

TEST(Drift, OneElementThatDiffersIsTold) {
  with_processes("shm", 2, [] {
    nn::Linear model(5, 3);
    fill(*model, 1);
    torch::NoGradGuard no_grad;
    model->bias[2].fill_(1 + rank());
    const std::string written = written_by([&] { fully_shard(*model); });
    EXPECT_EQ(count(written, "'bias' different values"), rank() == 0 ? 1 : 0) << written;
  });
}

TEST(Drift, OtherSeedsOfReplicasAreTold) {
  with_processes("shm", 2, [] {
    torch::manual_seed(rank());
    nn::Linear model(4, 4);
    const auto mesh = init_device_mesh("cpu", {2, 1}, {"replicate", "shard"});
    const std::string written = written_by([&] { fully_shard(*model, {.mesh = mesh}); });
    EXPECT_EQ(count(written, "'weight' different values"), rank() == 0 ? 1 : 0) << written;
  });
}

// Every dtype and layout of tests/nn/subjects.h.
TEST(Drift, ParametersOfAnyDtypeAreCompared) {
  with_processes("shm", 2, [] {
    const auto subject = make_seeded({.make = subjects::odd});
    EXPECT_EQ(written_by([&] { fully_shard(*subject.module); }), "");
  });
}

void expect_values_of_the_first(const FullyShardOptions& options) {
  Net model;
  fill(*model, 1 + rank());
  model->register_buffer("flags", torch::full({3}, rank() == 0, torch::kBool));
  model->register_parameter("turned", torch::full({3, 5}, 1.0 + rank(), torch::kDouble).t());
  model->register_parameter("empty", torch::empty({0, 4}));
  model->register_parameter("expanded", torch::full({1}, 1.0 + rank()).expand({3}));
  model->register_buffer("expanded_too", torch::full({1}, 1.0 + rank()).expand({3}));
  const at::Tensor ignored = model->register_parameter("ignored", torch::full({2}, 1.0 + rank()));
  FullyShardOptions mine = options;
  mine.sync_module_states = true;
  mine.ignored_params = {ignored};
  fully_shard(*model->body, mine);
  fully_shard(*model, mine);
  for (const auto& [name, shard] : named_parameters(*model)) {
    if (name != "ignored") {
      const auto whole = sharded(shard).full_tensor();
      EXPECT_TRUE(torch::equal(whole, torch::ones_like(whole))) << name;
    }
  }
  for (const auto& buffer : model->named_buffers()) {
    EXPECT_TRUE(buffer.value().eq(1).all().item<bool>()) << buffer.key();
  }
  EXPECT_TRUE(torch::equal(ignored, torch::full({2}, 1.0 + rank())));
}

TEST_P(Drift, SyncModuleStatesGivesAllRanksTheFirstOnesValues) {
  on_threads(GetParam(), [] { expect_values_of_the_first({}); });
}

TEST(Drift, SyncModuleStatesOnHybridMeshesAndOverGloo) {
  on_threads(4, [] { expect_values_of_the_first({.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"})}); });
  with_processes("gloo", 2, [] { expect_values_of_the_first({}); });
}

TEST(Drift, SyncModuleStatesOnSomeRanksIsAnError) {
  on_threads(2, [] {
    nn::Linear model(4, 4);
    EXPECT_TRUE(contains(
        error_message([&] { fully_shard(*model, {.sync_module_states = rank() == 0}); }), "shard differently"));
  });
}

void expect_averages(const FullyShardOptions& options) {
  Net model;
  model->head->to(torch::kDouble);
  model->register_parameter("half", torch::ones({3}).to(torch::kBFloat16));
  model->register_parameter("complex", torch::ones({3}, torch::kComplexFloat));
  model->register_parameter("frozen", torch::full({2}, 1.0 + rank()), /*requires_grad=*/false);
  model->register_buffer("later", torch::empty({2}, torch::kMeta));
  const auto expanded = model->register_buffer("expanded", torch::full({1}, 1.0 + rank()).expand({3}));
  auto ignored = model->head->parameters();
  for (const char* name : {"half", "complex", "frozen"}) {
    ignored.push_back(model->named_parameters()[name]);
  }
  FullyShardOptions mine = options;
  mine.ignored_params = ignored;
  fully_shard(*model, mine);
  const double mean = 0.5 * (world_size() - 1) + 1;
  for (const bool buffers : {false, true}) {
    {
      torch::NoGradGuard no_grad;
      for (auto& tensor : ignored) {
        tensor.fill_(1 + rank());
      }
      model->norm->running_mean.fill_(1 + rank());
    }
    average_ignored_(*model, {.buffers = buffers});
    for (size_t i = 0; i + 1 < ignored.size(); ++i) {
      EXPECT_TRUE(ignored[i].eq(mean).all().item<bool>()) << i;
      EXPECT_TRUE(ignored[i].requires_grad());
    }
    EXPECT_TRUE(ignored.back().eq(1 + rank()).all().item<bool>()) << "frozen";
    EXPECT_TRUE(model->norm->running_mean.eq(buffers ? mean : 1 + rank()).all().item<bool>());
    EXPECT_TRUE(expanded.equal(torch::full({3}, buffers ? mean : 1.0 + rank())));
    EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 0);
  }
}

TEST_P(Drift, WhatIsIgnoredIsAveraged) {
  on_threads(GetParam(), [] { expect_averages({}); });
}

TEST(Drift, WhatIsIgnoredIsAveragedOnHybridMeshesAndOverGloo) {
  on_threads(4, [] { expect_averages({.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"})}); });
  with_processes("gloo", 3, [] { expect_averages({}); });
}

TEST(Drift, NothingIsAveragedWhileParametersAreWhole) {
  on_threads(2, [] {
    Net model;
    EXPECT_TRUE(contains(error_message([&] { average_ignored_(*model); }), "nothing in this module is sharded"));
    fully_shard(*model);
    const auto guard = summon_full_params(*model);
    EXPECT_TRUE(contains(error_message([&] { average_ignored_(*model); }), "after the guard"));
  });
}

} // namespace
} // namespace fsdp::testing
