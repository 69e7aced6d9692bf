#pragma once

#include <string>

#include <fsdp/state_dict.h>

namespace fsdp::disk {

/// An Error, which names the file, if what was read cannot go into a model: then nothing of it does. Sizes have been
/// compared as the pieces were read. `load_state_dict` has nothing to complain of afterwards. Else what is only here,
/// or only there.
IncompatibleKeys check_model(
    const std::string& file, const ShardedStateDict& here, const ShardedStateDict& there, bool strict);

} // namespace fsdp::disk
