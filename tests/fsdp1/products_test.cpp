// FullyShardedDataParallel in products of its options, and every kind of model, beside unsharded training.

#include "fsdp1/products.h"

namespace fsdp::testing::products {
namespace {

class Products : public ::testing::TestWithParam<Product> {};

TEST_P(Products, TrainAsUnsharded) {
  References references(arrangement_of(GetParam()));
  for (const auto& [product, choice] : some_of({GetParam()})) {
    SCOPED_TRACE(choice.str());
    const auto [trial, reference] = references.of(choice);
    on_threads(GetParam().ranks, [&, &product = product, &choice = choice, &trial = trial, &reference = reference] {
      auto options = options_for(product, choice);
      if (is_hybrid(product.strategy)) {
        options.device_mesh = mesh_of(c10::kCPU);
      }
      train_wrapped(trial, reference, [&](Subject& subject) { return wrap_parts(subject, options); });
    });
    if (HasFailure()) {
      return; // the others would say the same
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Products, ::testing::ValuesIn(all()), [](const auto& info) {
  return name_of(info.param);
});

class ProductsOverGloo : public ::testing::TestWithParam<int> {};

TEST_P(ProductsOverGloo, TrainAsUnsharded) {
  const auto train_all = [] {
    init({.backend = "gloo", .device = "cpu"});
    const std::optional<Mesh> mesh = GetParam() == 4 ? std::optional(mesh_of(c10::kCPU)) : std::nullopt;
    auto products = all();
    std::erase_if(products, [](const Product& product) { return product.ranks != GetParam(); });
    std::map<Strategy, References> references;
    for (const auto& [product, choice] : some_of(products)) {
      SCOPED_TRACE(name_of(product) + ": " + choice.str());
      References& known = references.try_emplace(product.strategy, arrangement_of(product)).first->second;
      const auto [trial, reference] = known.of(choice);
      auto options = options_for(product, choice);
      if (is_hybrid(product.strategy)) {
        options.device_mesh = mesh;
      }
      train_wrapped(trial, reference, [&](Subject& subject) { return wrap_parts(subject, options); });
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
} // namespace fsdp::testing::products
