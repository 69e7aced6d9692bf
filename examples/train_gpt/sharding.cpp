#include "sharding.h"

#include <fsdp/init.h>
#include <fsdp/mesh.h>

namespace train_gpt {
namespace {

fsdp::FullyShardOptions how_to_shard(const Options& options) {
  fsdp::FullyShardOptions how;
  how.reshard_after_forward = options.reshard_after_forward;
  how.mp_policy.param_dtype = options.param_dtype;
  how.mp_policy.reduce_dtype = options.reduce_dtype;
  if (options.offload) {
    how.offload_policy = fsdp::CPUOffloadPolicy{};
  }
  if (!options.mesh.empty()) {
    how.mesh = fsdp::init_device_mesh(fsdp::device().str(), options.mesh, {"replicate", "shard"});
  }
  return how;
}

} // namespace

fsdp::FSDPModule shard(GPT& model, const Options& options) {
  auto how = how_to_shard(options);
  for (auto& block : *model->blocks) {
    fsdp::fully_shard(block, how);
  }
  return fsdp::fully_shard(model, how);
}

} // namespace train_gpt
