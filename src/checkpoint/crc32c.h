#pragma once

#include <cstddef>
#include <cstdint>

namespace fsdp::disk {

/// So many are still near the processor when they are used again: read and checked, or summed up and written.
constexpr int64_t kBytesInCache = int64_t{1} << 17;

/// The checksum CRC-32C (Castagnoli) of bytes, or of those before, whose checksum is `before`, and these.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

/// The same without the processor's instruction.
uint32_t crc32c_by_table(const void* data, size_t bytes, uint32_t before = 0);

} // namespace fsdp::disk
