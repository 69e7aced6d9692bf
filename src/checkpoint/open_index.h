#pragma once

#include <string>

#include "checkpoint/checkpoint_index.h"

namespace fsdp::disk {

/// The path itself, if it is a checkpoint's; else the latest in that folder. An Error if there is none.
std::string find_checkpoint(const std::string& dir);

CheckpointIndex read_index(const std::string& checkpoint);

} // namespace fsdp::disk
