// Sharded training on GPUs, in every combination of its options, gives the bits of unsharded training on a GPU: two
// numbers have one sum, in whatever order, and hybrid meshes of 2 x 2 ranks add two twice.

#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "engine/runtime.h"
#include "engine/unit.h"
#include "fsdp1/products.h"
#include "gpu/gpus.h"
#include "nn/combinations.h"

namespace fsdp::testing {
namespace {

/// Of those, by FSDP_TEST_EVERY=n: a look at a machine that is lent for minutes.
bool is_wanted(int number) {
  const char* every = std::getenv("FSDP_TEST_EVERY");
  return every == nullptr || number % std::atoi(every) == 0;
}

class RanksOnGpus : public OnGpus, public ::testing::WithParamInterface<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, RanksOnGpus, ::testing::Values(1, 2, 4), ::testing::PrintToStringParamName());

TEST_P(RanksOnGpus, TrainInEveryCombination) {
  on_gpus(GetParam(), [] {
    const bool hybrid = GetParam() == 4;
    const std::optional<Mesh> mesh =
        hybrid ? std::optional(init_device_mesh("cuda", {2, 2}, {"replicate", "shard"})) : std::nullopt;
    int number = 0;
    for (const auto& combination : combinations::all()) {
      if (combination.hybrid != hybrid || !is_wanted(number++)) {
        continue;
      }
      SCOPED_TRACE(combinations::name_of(combination));
      Trial trial = combinations::trial_of(combination, GetParam());
      trial.steps = 2;
      const auto& reference = combinations::reference_of(combination, GetParam(), trial.steps);
      if (mesh) {
        trial.options.mesh = *mesh;
      }
      train_sharded(trial, reference);
      if (::testing::Test::HasFailure()) {
        return; // the others would say the same
      }
    }
  });
}

TEST_P(RanksOnGpus, TrainInEveryProductOfFsdp1sOptions) {
  on_gpus(GetParam(), [] {
    const std::optional<Mesh> mesh = GetParam() == 4 ? std::optional(products::mesh_of(c10::kCUDA)) : std::nullopt;
    for (const auto& product : products::all()) {
      if (product.ranks != GetParam() || (product.ranks == 4 && !products::is_hybrid(product.strategy))) {
        continue;
      }
      products::References references(products::arrangement_of(product));
      int number = 0;
      for (const auto& choice : products::choices_for(product)) {
        if (!is_wanted(number++)) {
          continue;
        }
        SCOPED_TRACE(products::name_of(product) + ": " + choice.str());
        const auto [trial, reference] = references.of(choice);
        auto options = products::options_for(product, choice);
        if (products::is_hybrid(product.strategy)) {
          options.device_mesh = mesh;
        }
        train_wrapped(trial, reference, [&](Subject& subject) { return products::wrap_parts(subject, options); });
        if (::testing::Test::HasFailure()) {
          return;
        }
      }
    }
  });
}

TEST_P(RanksOnGpus, TrainModelsOfEveryKind) {
  on_gpus(GetParam(), [] {
    const std::map<std::string, MakeSubject> kinds{
        {"uneven", subjects::mlp},
        {"checkpointed", [] { return subjects::tied(/*checkpointed=*/true); }},
        {"convolutions", subjects::convolutions},
        {"recurrent", subjects::recurrent},
        {"odd", subjects::odd}};
    const int replicas = GetParam() == 4 ? 2 : 1;
    const Arrangement arrangement{GetParam() / replicas, replicas};
    for (const auto& [name, make] : kinds) {
      SCOPED_TRACE(name);
      Trial trial{.make = make, .steps = 4};
      const auto reference = train_unsharded(trial, arrangement);
      if (replicas == 2) {
        trial.options.mesh = init_device_mesh("cuda", {2, 2}, {"replicate", "shard"});
      }
      train_sharded(trial, reference);
    }
  });
}

TEST_P(RanksOnGpus, TrainWithoutOnesPrefetchesAndWithMany) {
  on_gpus(GetParam(), [] {
    const int replicas = GetParam() == 4 ? 2 : 1;
    const Arrangement arrangement{GetParam() / replicas, replicas};
    Trial trial{.make = [] { return subjects::tied(); }, .steps = 4};
    const auto reference = train_unsharded(trial, arrangement);
    if (replicas == 2) {
      trial.options.mesh = init_device_mesh("cuda", {2, 2}, {"replicate", "shard"});
    }
    for (const size_t depth : {0, 1, 3}) {
      for (const int in_flight : {1, 3}) {
        SCOPED_TRACE(::testing::Message() << depth << " gathers, " << in_flight << " reductions");
        trial.prepare = [=](Subject&, FSDPModule& root) {
          root.unit()->runtime().set_prefetch(depth);
          root.set_reduce_scatter_max_input_buffers(in_flight);
        };
        train_sharded(trial, reference);
      }
    }
  });
}

// Ranks of a run that stops go on from its checkpoint as if it had not.
TEST_P(RanksOnGpus, GoOnFromACheckpoint) {
  on_gpus(GetParam(), [] {
    struct Run {
      explicit Run(int seed) {
        torch::manual_seed(seed);
        subject = subjects::mlp();
        for (const auto& part : subject.parts) {
          fully_shard(*part);
        }
        fully_shard(*subject.module);
        optimizer =
            std::make_unique<torch::optim::AdamW>(parameters(*subject.module), torch::optim::AdamWOptions(1e-2));
      }
      void train(int first, int last) {
        for (int step = first; step < last; ++step) {
          optimizer->zero_grad();
          subject.loss(rank(), step).backward();
          optimizer->step();
        }
      }
      Subject subject;
      std::unique_ptr<torch::optim::AdamW> optimizer;
    };
    Run whole(1), begun(1), resumed(2);
    whole.train(0, 6);
    begun.train(0, 3);
    const std::string folder = process_folder().string();
    save(folder, {.model = *begun.subject.module, .optimizer = begun.optimizer.get(), .step = 3});
    EXPECT_EQ(load(folder, {.model = *resumed.subject.module, .optimizer = resumed.optimizer.get()}).step, 3);
    resumed.train(3, 6);
    const auto wanted = full_state_dict(*whole.subject.module), got = full_state_dict(*resumed.subject.module);
    for (const auto& item : wanted) {
      expect_same(got[item.key()], item.value(), item.key());
      EXPECT_TRUE(item.value().is_cuda());
    }
  });
}

TEST_P(RanksOnGpus, SkipAStepThatOverflowedOnOne) {
  on_gpus(GetParam(), [] {
    torch::nn::Linear model(torch::nn::LinearOptions(4, 8).bias(false));
    fully_shard(model);
    const auto shard = model->parameters()[0];
    torch::optim::SGD optimizer({shard}, torch::optim::SGDOptions(1));
    ShardedGradScaler scaler({.init_scale = 4});
    const auto before = shard.detach().clone();
    for (const bool overflows : {true, false}) {
      optimizer.zero_grad();
      scaler.scale(model->weight.sum()).backward();
      if (overflows && rank() == world_size() - 1) {
        torch::NoGradGuard no_grad;
        shard.mutable_grad().flatten()[0].fill_(std::numeric_limits<float>::infinity());
      }
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(scaler.get_scale(), 2);
      expect_same(shard.detach(), overflows ? before : before - 1, "shard");
    }
  });
}

TEST_P(RanksOnGpus, ClipTheNormOfAllGradients) {
  on_gpus(GetParam(), [] {
    const Trial trial{.make = [] { return subjects::mlp(); }};
    const Arrangement arrangement{GetParam()};
    const auto reference = train_unsharded({.make = trial.make, .steps = 1}, arrangement);
    double squares = 0;
    for (const auto& [name, gradient] : reference.gradients[0]) {
      squares += gradient.to(torch::kDouble).pow(2).sum().item<double>();
    }
    const Subject subject = make_seeded(trial);
    fully_shard(*subject.module);
    subject.loss(rank(), 0).backward();
    const auto norm = clip_grad_norm_(*subject.module, 0.01);
    EXPECT_TRUE(norm.is_cuda());
    EXPECT_NEAR(norm.item<double>(), std::sqrt(squares), 1e-5 * std::sqrt(squares));
  });
}

} // namespace
} // namespace fsdp::testing
