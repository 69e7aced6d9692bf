#pragma once

namespace fsdp::nn {

/// From now on, `torch::save` of modules whose registered parameters are shards is an error. Thread safe.
void refuse_to_save_shards();

} // namespace fsdp::nn
