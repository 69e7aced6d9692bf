// When the collectives of hybrid meshes are started and waited for.

#include "comm/decorated_group.h"
#include "nn/parity.h"

namespace fsdp::testing {
namespace {

namespace nn = torch::nn;

constexpr int64_t kWidths[] = {4, 160}; // small all-reduces take another way

/// What a rank did, in order: "S3" starts the reduce-scatter of unit 3, "R3" its all-reduce, "~R3" waits for it.
using Line = std::string;

class NotedWork final : public Work {
 public:
  NotedWork(std::unique_ptr<Work> base, std::string what, Line& line)
      : base_(std::move(base)), what_(std::move(what)), line_(line) {
    line_ += (line_.empty() ? "" : " ") + what_;
  }
  bool done() override {
    return base_->done();
  }
  void wait() override {
    line_ += " ~" + what_;
    base_->wait();
  }

 private:
  std::unique_ptr<Work> base_;
  std::string what_;
  Line& line_;
};

class NotedGroup final : public DecoratedGroup {
 public:
  NotedGroup(std::shared_ptr<Group> base, Line& line) : DecoratedGroup(std::move(base)), line_(line) {}
  std::unique_ptr<Work> reduce_scatter(ReduceScatter args, const Label& label) override {
    return std::make_unique<NotedWork>(base_->reduce_scatter(std::move(args), label), "S" + label.unit, line_);
  }
  std::unique_ptr<Work> all_reduce(at::Tensor tensor, ReduceOp op, double divide_by, const Label& label) override {
    auto work = base_->all_reduce(std::move(tensor), op, divide_by, label);
    return std::make_unique<NotedWork>(std::move(work), "R" + label.unit, line_);
  }

 private:
  Line& line_;
};

/// Four units of two parameters each, on a mesh whose groups note what goes over them.
struct Layers {
  Layers(int64_t replicas, int64_t shards, int64_t width) : width(width) {
    const Mesh plain = init_device_mesh("cpu", {replicas, shards}, {"replicate", "shard"});
    const auto noted = [&](int dim) { return std::make_shared<NotedGroup>(plain.group(dim), line); };
    const Mesh mesh = Mesh::from_groups({noted(0), noted(1)}, {"replicate", "shard"});
    for (int i = 0; i < 4; ++i) {
      layers->push_back(nn::Linear(width, width));
      fully_shard(*layers[i], {.mesh = mesh});
    }
    root = fully_shard(*layers, {.mesh = mesh});
  }
  Line backward() {
    line.clear();
    layers->forward(torch::full({2, width}, rank() + 1.0)).sum().backward();
    return line;
  }

  int64_t width;
  Line line;
  nn::Sequential layers;
  std::optional<FSDPModule> root;
};

/// The all-reduce of a unit goes on while the next units' gradients are made and scattered.
void expect_overlap(int64_t width) {
  Layers layers(2, 2, width);
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(layers.backward(), "S3 ~S3 R3 S2 ~S2 R2 ~R3 S1 ~S1 R1 ~R2 S0 ~S0 R0 ~R1 ~R0");
  }
  layers.root->set_requires_all_reduce(false);
  EXPECT_EQ(layers.backward(), "S3 ~S3 S2 ~S2 S1 ~S1 S0 ~S0");
  layers.root->set_requires_all_reduce(true);
  layers.root->set_reduce_scatter_max_input_buffers(2);
  EXPECT_EQ(layers.backward(), "S3 S2 ~S3 R3 S1 ~S2 R2 ~R3 S0 ~S1 R1 ~S0 R0 ~R2 ~R1 ~R0");
}

/// Without a scatter there is nothing to wait for first, and each unit's parameters travel together.
void expect_one_all_reduce_a_unit(int64_t width) {
  Layers layers(4, 1, width);
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(layers.backward(), "S3 ~S3 R3 ~R3 S2 ~S2 R2 ~R2 S1 ~S1 R1 ~R1 S0 ~S0 R0 ~R0");
  }
}

TEST(Reductions, AllReducesOfHybridMeshesOverlapBackward) {
  for (const int64_t width : kWidths) {
    on_threads(4, [&] { expect_overlap(width); });
  }
}

TEST(Reductions, ReplicasWithoutShardsReduceEachUnitAtOnce) {
  for (const int64_t width : kWidths) {
    on_threads(4, [&] { expect_one_all_reduce_a_unit(width); });
  }
}

/// A part that was put off may still be on its way when its unit is reduced again, without it.
TEST(Reductions, PartsThatWerePutOffGoWithTheNextAllReduce) {
  on_threads(4, [] {
    const Mesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"});
    const auto layer = [] { return nn::Linear(nn::LinearOptions(4, 4).bias(false)); };
    auto first = layer(), second = layer();
    nn::Sequential model(first, second);
    auto root = fully_shard(*model, {.mesh = mesh});
    for (const int64_t buffers : {1, 2}) {
      root.set_reduce_scatter_max_input_buffers(buffers);
      model->zero_grad();
      const auto x = torch::full({2, 4}, rank() + 1.0);
      root.set_requires_all_reduce(false);
      root.set_is_last_backward(false);
      (first->forward(x) + second->forward(x)).sum().backward();
      root.set_requires_all_reduce(true);
      root.set_is_last_backward(true);
      first->forward(x).sum().backward();
      const auto gradient = [](const nn::Linear& of) { return sharded(of->parameters()[0]).full_grad(); };
      EXPECT_TRUE(torch::equal(gradient(first), torch::full({4, 4}, 10.0))) << buffers << gradient(first);
      EXPECT_TRUE(torch::equal(gradient(second), torch::full({4, 4}, 5.0))) << buffers << gradient(second);
    }
  });
}

TEST(ReductionsOfProcesses, AreStartedInTheSameOrder) {
  for (const char* backend : {"shm", "gloo"}) {
    on_processes(4, [&] {
      init({.backend = backend, .device = "cpu", .timeout = std::chrono::seconds(60)});
      for (const int64_t width : kWidths) {
        expect_overlap(width);
        expect_one_all_reduce_a_unit(width);
      }
      barrier();
      shutdown();
    });
  }
}

} // namespace
} // namespace fsdp::testing
