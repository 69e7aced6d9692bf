// Models over process groups that libfsdp did not make.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "comm/foreign_backends.h"
#include "comm/world.h"

namespace fsdp::testing {
namespace {

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

} // namespace
} // namespace fsdp::testing
