#pragma once

#include <cstddef>

/// Sizes in memory that is shared.
namespace fsdp::shm {

constexpr size_t kPage = 4096;
/// One core writes a line at a time; and memory that begins with a line is aligned as LibTorch's own, by which kernels
/// are chosen.
constexpr size_t kLine = 64;

/// `bytes` (or items), rounded up to whole units.
constexpr size_t whole(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}
constexpr size_t whole_lines(size_t bytes) {
  return whole(bytes, kLine);
}

} // namespace fsdp::shm
