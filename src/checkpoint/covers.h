#pragma once

#include <fsdp/extent.h>

#include "checkpoint/checkpoint_index.h"

namespace fsdp::disk {

/// Whether the pieces have all wanted elements, each once.
bool covers(const IndexedTensor& tensor, const Extent& want);

} // namespace fsdp::disk
