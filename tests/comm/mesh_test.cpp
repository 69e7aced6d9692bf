#include <fsdp/mesh.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fsdp/init.h>

#include "comm/c10d/factory.h"
#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

int sum_in(const Mesh& mesh, int dim, int mine) {
  at::Tensor tensor = at::full({1}, mine, at::kLong);
  mesh.group(dim)->all_reduce(tensor, ReduceOp::kSum, 1, {"test", ""})->wait();
  return static_cast<int>(tensor.item<int64_t>());
}

TEST(Mesh, OfOneDimensionIsTheWorld) {
  on_threads(3, [] {
    const Mesh mesh = init_device_mesh("cpu", {3}, {"shard"});
    EXPECT_EQ(mesh.ndim(), 1);
    EXPECT_EQ(mesh.numel(), 3);
    EXPECT_EQ(mesh.coordinate(), rank());
    EXPECT_EQ(mesh.group(), world()); // no split
    EXPECT_EQ(mesh.str(), "Mesh(3, shard, cpu)");
    EXPECT_EQ(mesh.device(), c10::Device(c10::kCPU));
    EXPECT_EQ(default_mesh().group(), world());
    EXPECT_EQ(default_mesh(), default_mesh());
  });
}

TEST(Mesh, OfTwoDimensionsIsRowMajor) {
  on_threads(4, [] {
    const Mesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    EXPECT_EQ(mesh.coordinate(0), rank() / 2);
    EXPECT_EQ(mesh.coordinate(1), rank() % 2);
    EXPECT_EQ(sum_in(mesh, 0, rank()), 2 * (rank() % 2) + 2); // r and r + 2
    EXPECT_EQ(sum_in(mesh, 1, rank()), rank() / 2 * 4 + 1); // 2r and 2r + 1
    EXPECT_EQ(mesh.str(), "Mesh(2x2, replicate x shard, cpu)");
    EXPECT_EQ(mesh.sizes(), (std::vector<int64_t>{2, 2}));
  });
}

TEST(Mesh, OfThreeDimensionsWithAnOddOne) {
  on_threads(6, [] {
    const Mesh mesh = init_device_mesh("cpu", {3, 1, 2});
    EXPECT_EQ(mesh.coordinate(0), rank() / 2);
    EXPECT_EQ(mesh.coordinate(1), 0);
    EXPECT_EQ(mesh.coordinate(2), rank() % 2);
    EXPECT_EQ(sum_in(mesh, 0, 1), 3);
    EXPECT_EQ(sum_in(mesh, 1, 1), 1);
    EXPECT_EQ(sum_in(mesh, 2, 1), 2);
    EXPECT_EQ(mesh.str(), "Mesh(3x1x2, cpu)");
  });
}

TEST(Mesh, SlicesShareTheGroups) {
  on_threads(4, [] {
    const Mesh mesh = init_device_mesh("cpu", {2, 1, 2}, {"replicate", "pipe", "shard"});
    const Mesh shard = mesh["shard"];
    EXPECT_EQ(shard.group(), mesh.group(2));
    EXPECT_EQ(shard.names(), (std::vector<std::string>{"shard"}));
    EXPECT_EQ(shard.coordinate(), rank() % 2);
    const Mesh both = mesh[{"replicate", "shard"}];
    EXPECT_EQ(both.ndim(), 2);
    EXPECT_EQ(both.group(0), mesh.group(0));
    EXPECT_EQ(both.group(1), mesh.group(2));
    EXPECT_EQ(both["shard"], shard);
    EXPECT_FALSE(both == mesh);
  });
}

TEST(Mesh, EqualIfTheSameRanksAreArrangedAlike) {
  on_threads(4, [] {
    const Mesh first = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    const Mesh again = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    const Mesh renamed = init_device_mesh("cpu", {2, 2}, {"outer", "inner"});
    const Mesh line = init_device_mesh("cpu", {4}, {"shard"});
    EXPECT_EQ(first, again);
    EXPECT_FALSE(first == renamed);
    EXPECT_FALSE(first == line);
    EXPECT_FALSE(first["shard"] == first["replicate"]);
    const Mesh copy = first;
    EXPECT_EQ(copy, first);
  });
}

TEST(Mesh, FromGroups) {
  on_threads(4, [] {
    const auto inner = world()->split(rank() / 2, {"test", ""});
    const auto outer = world()->split(rank() % 2, {"test", ""});
    const Mesh mesh = Mesh::from_groups({outer, inner}, {"replicate", "shard"});
    EXPECT_EQ(mesh.sizes(), (std::vector<int64_t>{2, 2}));
    EXPECT_EQ(mesh.coordinate(1), rank() % 2);
    EXPECT_EQ(mesh["shard"].group(), inner);
    EXPECT_EQ(Mesh::from_group(inner, "shard"), mesh["shard"]);
    EXPECT_TRUE(contains(error_message([&] { Mesh::from_groups({outer, inner}, {"one"}); }), "a name for each of 2"));
    EXPECT_TRUE(contains(error_message([&] { Mesh::from_groups({}, {}); }), "got none"));
    EXPECT_TRUE(contains(error_message([&] { Mesh::from_group(std::shared_ptr<Group>()); }), "got null"));
  });
}

TEST(Mesh, MistakesAreErrorsOnEveryRankAlone) {
  on_threads(2, [] {
    const auto error = [](std::vector<int64_t> sizes, std::vector<std::string> names = {}) {
      return error_message([&] { init_device_mesh("cpu", sizes, names); });
    };
    EXPECT_TRUE(contains(error({3}), "the number of ranks, 2, got 3"));
    EXPECT_TRUE(contains(error({2, 2}), "got 2x2"));
    EXPECT_TRUE(contains(error({int64_t{1} << 40, int64_t{1} << 40}), "number of ranks"));
    EXPECT_TRUE(contains(error({}), "1 to 8 dimensions, got 0"));
    EXPECT_TRUE(contains(error(std::vector<int64_t>(9, 1)), "got 9"));
    EXPECT_TRUE(contains(error({-1, -2}), "positive"));
    EXPECT_TRUE(contains(error({0}), "positive"));
    EXPECT_TRUE(contains(error({2}, {"a", "b"}), "a name for each of 1"));
    EXPECT_TRUE(contains(error({1, 2}, {"a", "a"}), "distinct"));
    EXPECT_TRUE(contains(error({1, 2}, {"a", ""}), "not empty"));
    EXPECT_TRUE(contains(error_message([] { init_device_mesh("cuda", {2}); }), "trains on, cpu, got 'cuda'"));
    EXPECT_TRUE(contains(error_message([] { init_device_mesh("abacus", {2}); }), "got 'abacus'"));
  });
}

TEST(Mesh, SlicesThatAreNotThereAreErrors) {
  on_threads(2, [] {
    const Mesh mesh = init_device_mesh("cpu", {1, 2}, {"replicate", "shard"});
    EXPECT_TRUE(contains(error_message([&] { mesh["pipe"]; }), "got pipe"));
    EXPECT_TRUE(contains(error_message([&] { mesh[{"shard", "replicate"}]; }), "in its order"));
    EXPECT_TRUE(contains(error_message([&] { mesh[{"shard", "shard"}]; }), "each once"));
    EXPECT_TRUE(contains(error_message([&] { mesh[std::vector<std::string>{}]; }), "got none"));
    EXPECT_TRUE(contains(error_message([&] { mesh.group(2); }), "0 to 1, got 2"));
    EXPECT_TRUE(contains(error_message([&] { mesh.coordinate(-1); }), "got -1"));
  });
}

TEST(Mesh, NeedsInit) {
  EXPECT_TRUE(contains(error_message([] { init_device_mesh("cpu", {1}); }), "call fsdp::init() first"));
  EXPECT_TRUE(contains(error_message([] { default_mesh(); }), "call fsdp::init() first"));
}

TEST(Mesh, OverGlooSplitsTheWorld) {
  if (!gloo_available()) {
    GTEST_SKIP() << "built without Gloo";
  }
  on_processes(4, [] {
    init({.backend = "gloo"});
    const Mesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    EXPECT_EQ(mesh["shard"].group()->name(), "gloo");
    EXPECT_EQ(sum_in(mesh, 1, rank()), rank() / 2 * 4 + 1);
    EXPECT_EQ(sum_in(mesh, 0, rank()), 2 * (rank() % 2) + 2);
    barrier();
  });
}

} // namespace
} // namespace fsdp::testing
