#include "sharding.h"

#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/init.h>
#include <fsdp/mesh.h>

namespace train_gpt {
namespace {

fsdp::Mesh hybrid_mesh(const Options& options) {
  return fsdp::init_device_mesh(fsdp::device().str(), options.mesh, {"replicate", "shard"});
}

fsdp::FullyShardOptions how_to_shard(const Options& options) {
  fsdp::FullyShardOptions how;
  how.reshard_after_forward = options.reshard_after_forward;
  how.mp_policy.param_dtype = options.param_dtype;
  how.mp_policy.reduce_dtype = options.reduce_dtype;
  if (options.offload) {
    how.offload_policy = fsdp::CPUOffloadPolicy{};
  }
  if (!options.mesh.empty()) {
    how.mesh = hybrid_mesh(options);
  }
  return how;
}

fsdp::FSDPModule fully_shard_blocks(GPT& model, const Options& options) {
  auto how = how_to_shard(options);
  for (auto& block : *model->blocks) {
    fsdp::fully_shard(block, how);
  }
  return fsdp::fully_shard(model, how);
}

fsdp::ShardingStrategy strategy(const Options& options) {
  using enum fsdp::ShardingStrategy;
  const bool stays_whole = options.reshard_after_forward.reshard() == false;
  if (options.mesh.empty()) {
    return stays_whole ? kShardGradOp : kFullShard;
  }
  return stays_whole ? kHybridShardZero2 : kHybridShard;
}

fsdp::FSDPModule wrap_blocks(GPT& model, const Options& options) {
  fsdp::FSDPOptions how;
  how.sharding_strategy = strategy(options);
  how.cpu_offload.offload_params = options.offload;
  how.auto_wrap_policy = fsdp::ModuleWrapPolicy::of<BlockImpl>();
  how.mixed_precision.param_dtype = options.param_dtype;
  how.mixed_precision.reduce_dtype = options.reduce_dtype;
  if (!options.mesh.empty()) {
    how.device_mesh = hybrid_mesh(options);
  }
  return fsdp::FullyShardedDataParallel<GPT>(model, how).unit();
}

} // namespace

fsdp::FSDPModule shard(GPT& model, const Options& options) {
  return options.fsdp1 ? wrap_blocks(model, options) : fully_shard_blocks(model, options);
}

} // namespace train_gpt
