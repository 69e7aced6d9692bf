// Models over process groups that libfsdp did not make.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "comm/foreign_backends.h"
#include "comm/world.h"

namespace fsdp::testing {
namespace {

using ProcessGroupPointer = c10::intrusive_ptr<c10d::ProcessGroup>;

TEST(ForeignGroups, BuffersComeFromTheProcessGroupWhereThatIsWanted) {
  const auto train = [](const GroupPointer& group) {
    const ThreadWorld world({.group = group, .local_rank = group->rank()});
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    const FullyShardOptions options{.mesh = Mesh::from_groups({group}, {"shard"}, c10::kCPU)};
    fully_shard(*model[0], options);
    auto root = fully_shard(*model, options);
    const auto allocated_in_a_step = [&] {
      const int before = Sparse::allocated;
      model->forward(torch::ones({2, 4})).sum().backward();
      return Sparse::allocated - before;
    };
    EXPECT_EQ(allocated_in_a_step(), 0);
    root.set_allocate_memory_from_process_group_for_comm(true);
    EXPECT_GT(allocated_in_a_step(), 0);
    root.set_allocate_memory_from_process_group_for_comm(false);
    EXPECT_EQ(allocated_in_a_step(), 0);
  };
  run_foreign(2, train, &sparse);
}

void expect_collectives_on_shards_are_read(const ProcessGroupPointer& process_group, const GroupPointer& group) {
  const ThreadWorld world({.group = group, .local_rank = group->rank()});
  torch::nn::Linear model(3, 4);
  fully_shard(*model, {.mesh = Mesh::from_groups({group}, {"shard"}, c10::kCPU)});
  const torch::NoGradGuard no_grad;
  const auto all_reduce = [&](const at::Tensor& tensor) {
    Tensors tensors{tensor};
    process_group->allreduce(tensors)->wait();
  };
  const auto expect_output = [&](double expected) {
    const at::Tensor output = model->forward(torch::ones({1, 3}));
    EXPECT_TRUE(output.equal(torch::full({1, 4}, expected))) << group->name() << ": " << output;
  };
  for (auto& shard : model->parameters()) {
    shard.fill_(1);
  }
  expect_output(4);
  for (const auto& shard : model->parameters()) {
    all_reduce(shard);
  }
  expect_output(8);
  all_reduce(model->weight);
  expect_output(14);
}

/// As for averages of models that are trained apart; with no word to libfsdp, in the midst of evaluations.
TEST(ForeignGroups, WhatTheirCollectivesWriteToShardsIsReadByAll) {
  on_processes(2, [] {
    const Launch launch = read_launch();
    Rendezvous rendezvous(launch, std::chrono::seconds(60));
    const auto process_group = make_process_group(rendezvous, launch, &as_it_is);
    expect_collectives_on_shards_are_read(process_group, Group::from(process_group));
    expect_collectives_on_shards_are_read(process_group, Group::nearest(process_group, c10::kCPU));
    rendezvous.leave(std::chrono::seconds(20));
  });
}

} // namespace
} // namespace fsdp::testing
