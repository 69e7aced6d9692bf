#pragma once

#include <fsdp/fully_sharded_data_parallel.h>

namespace fsdp::comm_hooks {

/// Whether it is one of those here that give gradients another dtype.
bool compresses(const CommHook& hook);

} // namespace fsdp::comm_hooks
