// FullyShardedDataParallel in every product of its options, and every kind of model, beside unsharded training.

#include <map>
#include <sstream>
#include <tuple>

#include "fsdp1/train.h"

namespace fsdp::testing {
namespace {

using Strategy = ShardingStrategy;

struct Product {
  Strategy strategy;
  int ranks;
};

std::string name_of(const Product& product) {
  constexpr std::array kNames{"FullShard", "ShardGradOp", "NoShard", "HybridShard", "HybridShardZero2"};
  return kNames[static_cast<int>(product.strategy)] + std::string("_") + std::to_string(product.ranks);
}

std::vector<Product> products() {
  std::vector<Product> all;
  for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard}) {
    for (const int ranks : {1, 2, 3, 4}) {
      all.push_back({strategy, ranks});
    }
  }
  all.push_back({Strategy::kHybridShard, 4});
  all.push_back({Strategy::kHybridShardZero2, 4});
  return all;
}

bool is_hybrid(Strategy strategy) {
  return strategy == Strategy::kHybridShard || strategy == Strategy::kHybridShardZero2;
}

Arrangement arrangement_of(const Product& product) {
  if (is_hybrid(product.strategy)) {
    return {.shards = 2, .replicas = 2};
  }
  return product.strategy == Strategy::kNoShard ? Arrangement{.shards = 1, .replicas = product.ranks}
                                                : Arrangement{product.ranks};
}

/// The rest of the options, one of each.
struct Choice {
  std::optional<BackwardPrefetch> prefetch;
  bool offload, original, bf16, low_reduction, accumulates;

  std::string str() const {
    std::ostringstream text;
    text << "prefetch " << (prefetch ? static_cast<int>(*prefetch) : -1) << ", offload " << offload << ", original "
         << original << ", bf16 " << bf16 << ", low reduction " << low_reduction << ", no_sync " << accumulates;
    return text.str();
  }
};

// More than two low numbers are added in full precision and rounded once, the reference's after each addition.
bool adds_as_the_reference(const Product& product, const Choice& choice) {
  return !choice.low_reduction || (choice.bf16 && (product.ranks <= 2 || is_hybrid(product.strategy)));
}

std::vector<Choice> choices_for(const Product& product) {
  const std::optional<BackwardPrefetch> prefetches[] = {
      BackwardPrefetch::kBackwardPre, BackwardPrefetch::kBackwardPost, std::nullopt};
  std::vector<Choice> all;
  for (const auto& prefetch : prefetches) {
    for (int bits = 0; bits < 32; ++bits) {
      const auto bit = [bits](int n) { return (bits >> n & 1) != 0; };
      const Choice choice{prefetch, bit(0), bit(1), bit(2), bit(3), bit(4)};
      if (adds_as_the_reference(product, choice)) {
        all.push_back(choice);
      }
    }
  }
  return all;
}

FSDPOptions options_for(const Product& product, const Choice& choice) {
  FSDPOptions options;
  options.sharding_strategy = product.strategy;
  options.cpu_offload.offload_params = choice.offload;
  options.backward_prefetch = choice.prefetch;
  options.use_orig_params = choice.original;
  if (choice.bf16) {
    options.mixed_precision.param_dtype = torch::kBFloat16;
    options.mixed_precision.reduce_dtype = choice.low_reduction ? torch::kBFloat16 : torch::kFloat;
  }
  if (is_hybrid(product.strategy)) {
    options.device_mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
  }
  return options;
}

/// The unsharded training, which some of the options do not change.
class References {
 public:
  explicit References(const Arrangement& arrangement) : arrangement_(arrangement) {}

  std::pair<Trial, Reference> of(const Choice& choice) {
    const auto key = std::tuple(choice.bf16, choice.low_reduction, choice.accumulates);
    if (known_.count(key) == 0) {
      const Trial trial = trial_of(choice);
      known_.emplace(key, std::pair(trial, train_unsharded(trial, arrangement_)));
    }
    return known_.at(key);
  }

 private:
  static Trial trial_of(const Choice& choice) {
    Trial trial{.make = [] { return subjects::tied(); }, .steps = 2};
    trial.accumulate = choice.accumulates ? Accumulate::kNoSync : Accumulate::kNone;
    trial.flat = nn::FlatCut{};
    if (choice.bf16) {
      trial.options.mp_policy.param_dtype = torch::kBFloat16;
      trial.options.mp_policy.reduce_dtype = choice.low_reduction ? torch::kBFloat16 : torch::kFloat;
    }
    return trial;
  }

  Arrangement arrangement_;
  std::map<std::tuple<bool, bool, bool>, std::pair<Trial, Reference>> known_;
};

FSDPModule wrap_parts(Subject& subject, const FSDPOptions& options) {
  for (auto& part : subject.parts) {
    fsdp::detail::wrap_module(*part, options);
  }
  return fsdp::detail::wrap_module(*subject.module, options).unit();
}

class Products : public ::testing::TestWithParam<Product> {};

TEST_P(Products, TrainAsUnsharded) {
  References references(arrangement_of(GetParam()));
  for (const Choice& choice : choices_for(GetParam())) {
    SCOPED_TRACE(choice.str());
    const auto [trial, reference] = references.of(choice);
    on_threads(GetParam().ranks, [&, &trial = trial, &reference = reference] {
      const auto options = options_for(GetParam(), choice);
      train_wrapped(trial, reference, [&](Subject& subject) { return wrap_parts(subject, options); });
    });
    if (HasFailure()) {
      return; // the others would say the same
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Products, ::testing::ValuesIn(products()), [](const auto& info) {
  return name_of(info.param);
});

class ProductsOverGloo : public ::testing::TestWithParam<int> {};

TEST_P(ProductsOverGloo, TrainAsUnsharded) {
  const auto train_all = [] {
    init({.backend = "gloo", .device = "cpu"});
    for (const Product& product : products()) {
      if (product.ranks != GetParam()) {
        continue;
      }
      References references(arrangement_of(product));
      for (const Choice& choice : choices_for(product)) {
        SCOPED_TRACE(name_of(product) + ": " + choice.str());
        const auto [trial, reference] = references.of(choice);
        const auto options = options_for(product, choice);
        train_wrapped(trial, reference, [&](Subject& subject) { return wrap_parts(subject, options); });
      }
    }
    shutdown();
  };
  on_processes(GetParam(), train_all, {.timeout = std::chrono::minutes(8)}); // beside others, or with sanitizers
}

INSTANTIATE_TEST_SUITE_P(Ranks, ProductsOverGloo, ::testing::Values(1, 2, 3, 4));

/// A layer that is used twice, around one that is skipped.
struct SkipsImpl : torch::nn::Module {
  SkipsImpl() {
    first = register_module("first", subjects::Block(6));
    second = register_module("second", subjects::Block(6));
    last = register_module("last", torch::nn::Linear(6, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto y = first->forward(x);
    return last(y + first->forward(second->forward(y)));
  }
  subjects::Block first{nullptr}, second{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(Skips);

Subject skips() {
  Skips model;
  return subjects::subject_of(
      model.ptr(),
      [model](int rank, int step) mutable {
        return model->forward(subjects::data(rank, step, {3, 6})).pow(2).mean();
      },
      {model->first.ptr(), model->second.ptr()});
}

Subject several_forwards() {
  Skips model;
  return subjects::subject_of(
      model.ptr(),
      [model](int rank, int step) mutable {
        const auto one = model->forward(subjects::data(rank, step, {3, 6}));
        const auto other = model->forward(subjects::data(rank, step + 50, {2, 6}));
        return one.pow(2).mean() + other.abs().mean();
      },
      {model->first.ptr(), model->second.ptr()});
}

Subject half_frozen() {
  Subject subject = subjects::mlp();
  subject.module->named_parameters()["0.weight"].set_requires_grad(false);
  subject.module->named_parameters()["4.bias"].set_requires_grad(false);
  return subject;
}

/// Most ranks have no element of what is trained.
Subject only_last_bias() {
  Subject subject = subjects::mlp();
  for (auto& item : subject.module->named_parameters()) {
    item.value().set_requires_grad(item.key() == "4.bias");
  }
  return subject;
}

Subject only_biases() {
  Subject subject = subjects::mlp();
  for (auto& item : subject.module->named_parameters()) {
    item.value().set_requires_grad(item.key().ends_with("bias"));
  }
  return subject;
}

struct KindOfModel {
  const char* name;
  MakeSubject make;
  bool original_only = false; ///< frozen and trainable parameters in one unit
};

const std::vector<KindOfModel> kKindsOfModels = {
    {"TransformerWithTies", [] { return subjects::tied(); }},
    {"TransformerWithCheckpoints", [] { return subjects::tied(/*checkpointed=*/true); }},
    {"BatchNorm", subjects::convolutions},
    {"Recurrent", subjects::recurrent},
    {"Uneven", subjects::mlp},
    {"Skips", skips},
    {"SeveralForwards", several_forwards},
    {"HalfFrozen", half_frozen, true},
    {"OnlyBiases", only_biases, true},
    {"OnlyLastBias", only_last_bias, true}};

class KindsOfModels : public ::testing::TestWithParam<std::tuple<KindOfModel, int>> {};

TEST_P(KindsOfModels, TrainAsUnsharded) {
  const auto& [kind, ranks] = GetParam();
  for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard}) {
    for (const bool original : {true, false}) {
      if (!original && kind.original_only) {
        continue;
      }
      const Product product{strategy, ranks};
      SCOPED_TRACE(name_of(product) + (original ? ", original" : ""));
      Trial trial{.make = kind.make, .steps = 3};
      trial.flat = nn::FlatCut{};
      const auto reference = train_unsharded(trial, arrangement_of(product));
      on_threads(ranks, [&, &kind = kind] {
        FSDPOptions options;
        options.sharding_strategy = strategy;
        options.use_orig_params = original;
        train_wrapped(trial, reference, [&](Subject& subject) { return wrap_parts(subject, options); });
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All,
    KindsOfModels,
    ::testing::Combine(::testing::ValuesIn(kKindsOfModels), ::testing::Values(1, 2, 3, 4)),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + "_" + std::to_string(std::get<1>(info.param));
    });

class Mixtures : public ::testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, Mixtures, ::testing::Values(1, 2, 3, 4), ::testing::PrintToStringParamName());

// Each rank has an expert of its own, wrapped over a group of itself: what is shared is reduced, the expert is not.
TEST_P(Mixtures, KeepExpertsToTheirRanks) {
  on_threads(GetParam(), [] {
    for (const bool original : {false, true}) {
      torch::manual_seed(3);
      barrier();
      torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
      const auto expert = model[1]->as<torch::nn::Linear>();
      {
        torch::NoGradGuard no_grad;
        for (auto& parameter : model->parameters()) {
          parameter.fill_(0.25);
        }
        expert->weight.fill_(1 + rank());
      }
      fsdp::detail::wrap_module(*expert, {.process_group = group_of_one(), .use_orig_params = original});
      FullyShardedDataParallel<torch::nn::Sequential> wrapped(model, {.use_orig_params = original});
      wrapped(torch::ones({2, 4}) * (1 + rank())).sum().backward();
      const auto guard = wrapped.summon_full_params({.writeback = false, .with_grads = original});
      EXPECT_TRUE(expert->parameters()[0].equal(torch::full({4, 4}, 1.0 + rank())));
      if (!original) {
        continue; // gradients are not shown whole
      }
      // Of a sum of 2 rows of outputs: the hidden layer's value, twice; and what is shared, the mean over the ranks.
      EXPECT_TRUE(expert->parameters()[0].grad().equal(torch::full({4, 4}, 2 * (0.25 + (1 + rank()) * 1.0))));
      double mean = 0;
      for (int each = 0; each < world_size(); ++each) {
        mean += 2.0 * (1 + each) * 4 * (1 + each) / world_size();
      }
      const auto shared = model[0]->as<torch::nn::Linear>()->parameters()[0].grad();
      EXPECT_TRUE(torch::allclose(shared, torch::full({4, 4}, mean))) << shared;
    }
  });
}

// Backwards with and without synchronization, in any order, add up.
TEST_P(Mixtures, OfBackwardsThatAreReducedAndThatAreNot) {
  on_threads(GetParam(), [] {
    const auto gradients_after = [](FSDPOptions options, const std::vector<bool>& synced) {
      const Trial trial{.make = [] { return subjects::mlp(); }};
      Subject subject = make_seeded(trial);
      barrier();
      options.auto_wrap_policy = ModuleWrapPolicy::of<torch::nn::Linear>();
      const auto instance = fsdp::detail::wrap_module(*subject.module, options);
      for (size_t i = 0; i < synced.size(); ++i) {
        std::optional<FSDPInstance::NoSync> no_sync;
        if (!synced[i]) {
          no_sync.emplace(instance.no_sync());
        }
        subject.loss(rank(), static_cast<int>(i)).backward();
      }
      std::vector<at::Tensor> gradients;
      for (const auto& parameter : subject.module->parameters()) {
        gradients.push_back(parameter.grad().clone());
      }
      return gradients;
    };
    for (const auto strategy : {Strategy::kFullShard, Strategy::kShardGradOp, Strategy::kNoShard}) {
      for (const bool original : {false, true}) {
        const FSDPOptions options{.sharding_strategy = strategy, .use_orig_params = original};
        const auto wanted = gradients_after(options, {true, true, true, true, true});
        for (const auto& synced : std::vector<std::vector<bool>>{
                 {false, false, false, false, true},
                 {true, false, true, false, true},
                 {false, true, true, false, true}}) {
          const auto got = gradients_after(options, synced);
          for (size_t i = 0; i < wanted.size(); ++i) {
            EXPECT_TRUE(torch::allclose(got[i], wanted[i], 1e-5, 1e-7)) << i;
          }
        }
      }
    }
  });
}

// A plain module with several roots below it.
TEST_P(Mixtures, MayHaveSeveralRootsBelowAPlainModule) {
  Trial trial{.make = [] { return skips(); }, .steps = 3};
  trial.flat = nn::FlatCut{};
  const auto reference = train_unsharded(trial, {GetParam()});
  on_threads(GetParam(), [&] {
    Subject subject = make_seeded(trial);
    barrier();
    const auto last = std::dynamic_pointer_cast<SkipsImpl>(subject.module)->last.ptr();
    for (const auto& part : {subject.parts[0], subject.parts[1], std::static_pointer_cast<torch::nn::Module>(last)}) {
      fsdp::detail::wrap_module(*part, {});
    }
    EXPECT_EQ(fsdp_modules(subject.module, /*root_only=*/true).size(), 3);
    torch::optim::AdamW optimizer(subject.module->parameters(), torch::optim::AdamWOptions(1e-2));
    std::vector<at::Tensor> losses;
    for (int step = 0; step < trial.steps; ++step) {
      optimizer.zero_grad();
      losses.push_back(subject.loss(rank(), step));
      losses.back().backward();
      optimizer.step();
    }
    expect_losses(losses, reference, trial);
    for (const auto& item : full_state_dict(subject.module)) {
      expect_same(item.value(), reference.parameters.at(item.key()), item.key());
    }
  });
}

} // namespace
} // namespace fsdp::testing
