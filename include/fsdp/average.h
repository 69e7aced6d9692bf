#pragma once

#include <fsdp/export.h>
#include <fsdp/module_ref.h>

namespace fsdp {

struct AverageOptions {
  bool buffers = false; ///< floating-point buffers too: BatchNorm's running statistics
};

/// Gives all ranks the average of what is not sharded: the values of trainable parameters in `ignored_params`, which
/// each rank trains on its own; nothing else keeps them alike. In a fixed number of collectives, over the module's
/// mesh. Between steps, as often as they are to agree. Collective.
FSDP_API void average_ignored_(ModuleRef module, const AverageOptions& options = {});

} // namespace fsdp
