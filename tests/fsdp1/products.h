#pragma once

#include <array>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp1/train.h"
#include "support/selected.h"

/// FullyShardedDataParallel's options, in every product.
namespace fsdp::testing::products {

using Strategy = ShardingStrategy;

struct Product {
  Strategy strategy;
  int ranks;
};

inline std::string name_of(const Product& product) {
  constexpr std::array kNames{"FullShard", "ShardGradOp", "NoShard", "HybridShard", "HybridShardZero2"};
  return kNames[static_cast<int>(product.strategy)] + std::string("_") + std::to_string(product.ranks);
}

inline std::vector<Product> all() {
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

inline bool is_hybrid(Strategy strategy) {
  return strategy == Strategy::kHybridShard || strategy == Strategy::kHybridShardZero2;
}

inline Arrangement arrangement_of(const Product& product) {
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
inline bool adds_as_the_reference(const Product& product, const Choice& choice) {
  return !choice.low_reduction || (choice.bf16 && (product.ranks <= 2 || is_hybrid(product.strategy)));
}

inline std::vector<Choice> choices_for(const Product& product) {
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

/// With the strategy, those in which any three options meet in every way.
inline std::vector<std::pair<Product, Choice>> some_of(const std::vector<Product>& products) {
  std::vector<std::pair<Product, Choice>> all;
  for (const Product& product : products) {
    for (const Choice& choice : choices_for(product)) {
      all.emplace_back(product, choice);
    }
  }
  return selected(all, /*together=*/3, [](const auto& each) -> std::vector<int> {
    const auto& [product, c] = each;
    const int strategy = static_cast<int>(product.strategy), prefetch = c.prefetch ? static_cast<int>(*c.prefetch) : 2;
    return {strategy, prefetch, c.offload, c.original, c.bf16, c.low_reduction, c.accumulates};
  });
}

inline Mesh mesh_of(c10::DeviceType type) {
  return init_device_mesh(c10::DeviceTypeName(type, /*lower_case=*/true), {2, 2}, {"replicate", "shard"});
}

/// Hybrid strategies need a mesh besides.
inline FSDPOptions options_for(const Product& product, const Choice& choice) {
  FSDPOptions options;
  options.sharding_strategy = product.strategy;
  options.cpu_offload.offload_params = choice.offload;
  options.backward_prefetch = choice.prefetch;
  options.use_orig_params = choice.original;
  if (choice.bf16) {
    options.mixed_precision.param_dtype = torch::kBFloat16;
    options.mixed_precision.reduce_dtype = choice.low_reduction ? torch::kBFloat16 : torch::kFloat;
  }
  return options;
}

/// The unsharded training, which some of the options do not change.
class References {
 public:
  explicit References(const Arrangement& arrangement) : arrangement_(arrangement) {}

  std::pair<Trial, Reference> of(const Choice& choice) {
    const auto key = std::tuple(choice.bf16, choice.offload, choice.low_reduction, choice.accumulates);
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
    if (choice.offload) {
      trial.options.offload_policy = CPUOffloadPolicy{};
    }
    if (choice.bf16) {
      trial.options.mp_policy.param_dtype = torch::kBFloat16;
      trial.options.mp_policy.reduce_dtype = choice.low_reduction ? torch::kBFloat16 : torch::kFloat;
    }
    return trial;
  }

  Arrangement arrangement_;
  std::map<std::tuple<bool, bool, bool, bool>, std::pair<Trial, Reference>> known_;
};

inline FSDPModule wrap_parts(Subject& subject, const FSDPOptions& options) {
  for (auto& part : subject.parts) {
    fsdp::detail::wrap_module(*part, options);
  }
  return fsdp::detail::wrap_module(*subject.module, options).unit();
}

} // namespace fsdp::testing::products
