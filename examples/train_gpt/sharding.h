#pragma once

#include <fsdp/fully_shard.h>

#include "model.h"
#include "options.h"

namespace train_gpt {

/// Shards the model over the job's ranks: each block is a unit, what remains (embedding and last norm) is the root's.
fsdp::FSDPModule shard(GPT& model, const Options& options);

} // namespace train_gpt
