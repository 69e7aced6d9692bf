#pragma once

#include <cstddef>

namespace fsdp::disk {

/// Copies bytes that nobody needs soon: past the caches, where the processor can do that, which spares memory the
/// reading of what is going to be written over.
void stream_copy(void* to, const void* from, size_t bytes);

} // namespace fsdp::disk
