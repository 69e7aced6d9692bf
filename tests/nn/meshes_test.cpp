// Meshes of every form, each beside the unsharded reference.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/c10d/factory.h"
#include "comm/launcher.h"
#include "comm/rendezvous.h"
#include "comm/world.h"
#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

Trial tied() {
  return {.make = [] { return subjects::tied(); }};
}

/// Whatever ranks add up their gradients, the mean is the same: of 1, 2 or 4 ranks to the bit.
Trial tied_with_the_same_data_everywhere() {
  return {.make = [] {
    Subject subject = subjects::tied();
    subject.loss = [of_rank = subject.loss](int, int step) { return of_rank(0, step); };
    return subject;
  }};
}

constexpr Arrangement kFour{.shards = 2, .replicas = 2};

bool is_weight(const std::string& name) {
  return name.find("weight") != std::string::npos;
}

FullyShardOptions weights_apart(const Mesh& of_weights, const Mesh& of_others) {
  return {.mesh = of_others, .shard_placement_fn = [=](const at::Tensor&, const std::string& name) {
            return is_weight(name) ? std::optional(ShardPlacement{.mesh = of_weights}) : std::nullopt;
          }};
}

/// Looks where the shards lie, then trains.
void expect_weights_apart(
    Trial trial, const Arrangement& arrangement, const std::function<std::pair<Mesh, Mesh>()>& make) {
  const auto reference = train_unsharded(trial, arrangement);
  on_threads(arrangement.ranks(), [&] {
    Trial mine = trial;
    const auto [of_weights, of_others] = make();
    mine.options = weights_apart(of_weights, of_others);
    mine.prepare = [&](Subject& subject, FSDPModule&) {
      for (const auto& [name, shard] : named_parameters(*subject.module)) {
        EXPECT_TRUE(sharded(shard).mesh == (is_weight(name) ? of_weights : of_others)) << name;
      }
    };
    train_sharded(mine, reference);
  });
}

TEST(Meshes, AParametersOwnMayBeAnotherSliceOfTheSameMesh) {
  expect_weights_apart(tied_with_the_same_data_everywhere(), kFour, [] {
    const Mesh both = init_device_mesh("cpu", {2, 2}, {"a", "b"});
    return std::pair{both["b"], both["a"]};
  });
}

TEST(Meshes, AParametersOwnMayHaveOtherDimensions) {
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{1, 2}, {2, 1}}) {
    expect_weights_apart(tied(), {2}, [&] {
      return std::pair{init_device_mesh("cpu", sizes, {"replicate", "shard"}), default_mesh()};
    });
    expect_weights_apart(tied(), {2}, [&] {
      return std::pair{default_mesh(), init_device_mesh("cpu", sizes, {"replicate", "shard"})};
    });
  }
}

TEST(Meshes, ThoseOfThreeDimensionsAreSliced) {
  const auto slice = [](std::vector<int64_t> sizes, std::vector<std::string> names) {
    return [=](FullyShardOptions& options) { options.mesh = init_device_mesh("cpu", sizes, {"a", "b", "c"})[names]; };
  };
  expect_parity_with(tied(), kFour, slice({1, 2, 2}, {"b", "c"}));
  expect_parity_with(tied(), kFour, slice({2, 1, 2}, {"a", "c"}));
  expect_parity_with(tied(), kFour, slice({2, 2, 1}, {"a", "b"}));
  // Ranks outside of the slice train a model of their own.
  expect_parity_with(tied_with_the_same_data_everywhere(), kFour, slice({2, 2, 1}, {"b", "c"}));
  expect_parity_with(tied_with_the_same_data_everywhere(), kFour, slice({2, 1, 2}, {"b", "c"}));
  expect_parity_with(tied_with_the_same_data_everywhere(), kFour, slice({1, 2, 2}, {"c"}));
}

TEST(Meshes, OfOneReplicaOrOneShard) {
  Trial in_bfloat16 = tied();
  in_bfloat16.options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  for (const Trial& trial : {tied(), in_bfloat16}) {
    for (const int ranks : {1, 2, 3, 4}) {
      expect_parity_hybrid(trial, {.shards = ranks, .replicas = 1});
      expect_parity_hybrid(trial, {.shards = 1, .replicas = ranks});
    }
  }
}

// What their ranks do among themselves is theirs: hosts may have more memory or less.
TEST(Meshes, ReplicasMayGatherInTheirOwnWays) {
  const Trial trial{.make = [] { return subjects::tied(); }, .steps = 3};
  const auto reference = train_unsharded(trial, kFour);
  on_threads(4, [&] {
    Trial mine = trial;
    mine.options.mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    mine.options.reshard_after_forward = rank() < 2;
    if (rank() < 2) {
      mine.options.offload_policy = CPUOffloadPolicy{};
    }
    train_sharded(mine, reference);
  });
}

TEST(Meshes, ReshardingToOneRankOrToAll) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const int among : {1, ranks}) {
      Trial trial = tied();
      trial.options.reshard_after_forward = among;
      expect_parity(trial, ranks);
      trial.options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
      expect_parity(trial, ranks);
    }
  }
}

// As a program does that has made its process group itself.
void train_over_process_group(const Trial& trial, int ranks) {
  on_processes(ranks, [&] {
    const auto reference = train_unsharded(trial, {ranks});
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const auto make_group = gloo_process_groups(std::chrono::seconds(60));
    Trial mine = trial;
    mine.options.mesh = Mesh::from_group(make_group(rendezvous.store("group"), launch.rank, launch.size), "shard");
    const ThreadWorld world({.group = mine.options.mesh->group(), .local_rank = launch.rank});
    train_sharded(mine, reference);
    rendezvous.leave(std::chrono::seconds(20));
  });
}

TEST(Meshes, OfAProcessGroupMadeElsewhere) {
  if (!gloo_available()) {
    GTEST_SKIP() << "built without Gloo";
  }
  Trial in_bfloat16 = tied();
  in_bfloat16.options.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  for (const int ranks : {2, 3}) {
    train_over_process_group(tied(), ranks);
    train_over_process_group(in_bfloat16, ranks);
  }
}

} // namespace
} // namespace fsdp::testing
