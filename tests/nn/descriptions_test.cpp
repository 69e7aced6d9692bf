// What a model, a unit and a shard say of themselves.

#include "nn/parity.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

class Descriptions : public ::testing::TestWithParam<int> {};

TEST_P(Descriptions, ListsTheUnits) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2));
    fully_shard(*model[0], {.mp_policy = {.param_dtype = torch::kBFloat16}});
    fully_shard(*model);
    const auto description = describe(*model);
    ASSERT_EQ(description.units.size(), 2u);
    EXPECT_EQ(description.units[0].name, "0");
    EXPECT_EQ(description.units[0].numel, 18);
    EXPECT_EQ(description.units[0].dtype, "float32 -> bfloat16");
    EXPECT_EQ(description.units[0].bytes_whole, 36);
    EXPECT_EQ(description.units[0].policy, "reshard");
    EXPECT_EQ(description.units[1].name, "(root)");
    EXPECT_EQ(description.units[1].policy, "keep");
    EXPECT_NE(description.str().find("This rank keeps"), std::string::npos);
    EXPECT_EQ(description.units[1].parameters, 2);
    const Mesh mesh = default_mesh();
    for (const auto& unit : description.units) {
      EXPECT_EQ(unit.mesh, mesh.str());
    }
    int64_t bytes_of_shards = 0;
    for (const auto& shard : model->parameters()) {
      bytes_of_shards += static_cast<int64_t>(shard.nbytes());
    }
    EXPECT_EQ(description.units[0].bytes_shard + description.units[1].bytes_shard, bytes_of_shards);
    EXPECT_EQ(description.bytes_shard, bytes_of_shards);
    // Shards and their gradients, and at the least one unit that passes.
    EXPECT_GE(description.bytes_peak, 2 * bytes_of_shards + (world_size() == 1 ? 0 : 36));
  });
}

TEST_P(Descriptions, ShowsWhatUnitsAreKeptAs) {
  on_threads(GetParam(), [] {
    nn::Sequential model(nn::Linear(5, 3), nn::Linear(3, 2), nn::Linear(2, 2));
    fully_shard(*model[0], {.reshard_after_forward = world_size()});
    fully_shard(*model[1], {.reshard_after_forward = false, .offload_policy = CPUOffloadPolicy{}});
    fully_shard(*model[2], {.reshard_after_forward = 1});
    std::vector<std::string> policies;
    const auto description = describe(*model);
    for (const auto& unit : description.units) {
      policies.push_back(unit.policy);
      EXPECT_NE(description.str().find(unit.policy), std::string::npos);
    }
    const auto among_all = "reshard to " + std::to_string(world_size());
    EXPECT_EQ(policies, (std::vector<std::string>{among_all, "keep, offload", "reshard to 1"}));
  });
}

TEST_P(Descriptions, AShardKnowsTheWhole) {
  on_threads(GetParam(), [] {
    nn::Linear model(nn::LinearOptions(6, 5).bias(false));
    model->weight.set_data(torch::arange(30, torch::kDouble).view({6, 5}).t());
    const auto original = model->weight.detach().clone();
    const int ranks = world_size();
    const int replicas = ranks % 2 == 0 ? 2 : 1;
    const Mesh mesh = init_device_mesh("cpu", {replicas, ranks / replicas}, {"replicate", "shard"});
    fully_shard(*model, {.mesh = mesh, .shard_placement_fn = [](const at::Tensor&, const std::string&) {
                           return ShardPlacement{.dim = 1};
                         }});
    const auto weight = sharded(model->parameters()[0]);
    EXPECT_EQ(weight.name, "weight");
    EXPECT_EQ(weight.sizes, (std::vector<int64_t>{5, 6}));
    EXPECT_EQ(weight.strides, (std::vector<int64_t>{1, 5}));
    EXPECT_EQ(weight.dtype(), torch::kDouble);
    EXPECT_EQ(weight.numel(), 30);
    EXPECT_TRUE(weight.mesh == mesh);
    ASSERT_EQ(weight.placements.size(), 2u);
    EXPECT_TRUE(weight.placements[0].is_replicate());
    EXPECT_EQ(weight.placements[1].shard_dim, 1);
    EXPECT_TRUE(torch::equal(weight.full_tensor(), original));
    EXPECT_TRUE(torch::equal(weight.local, piece_of(weight.local, original)));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Descriptions, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
