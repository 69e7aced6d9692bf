#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

namespace fsdp::shm {

/// Where blocks lie in a range of addresses: best fit, cut to size, merged with free neighbours. Arithmetic only: it
/// touches no memory, and equal calls give equal answers on every rank. Not thread safe.
class Blocks {
 public:
  struct Block {
    size_t offset;
    size_t bytes;
    uint64_t stamp; ///< the newest stamp with which any part of it was freed; 0 if it never was used
  };

  explicit Blocks(size_t capacity) : capacity_(capacity) {}

  /// A block of at least `bytes` bytes (a multiple of 4 KiB); of size 0 when there is no room.
  Block take(size_t bytes);
  /// Gives back a block by its offset; returns its size.
  size_t give_back(size_t offset, uint64_t stamp = 0);

  size_t bytes_in_use() const {
    return bytes_in_use_;
  }
  /// Calls `visit(offset, bytes)` for each free block: what it holds may be thrown away.
  template <typename Visit>
  void drop_free(const Visit& visit) {
    for (auto& [offset, block] : free_) {
      visit(offset, block.bytes);
    }
    drop_top();
  }

 private:
  struct Free {
    size_t bytes;
    uint64_t stamp;
  };
  using FreeMap = std::map<size_t, Free>;

  Block cut(FreeMap::iterator free, size_t bytes);
  Block extend(size_t bytes);
  FreeMap::iterator free_at_top(); // the end if there is none
  void insert_free(Block block);
  FreeMap::iterator erase_free(FreeMap::iterator block);
  void drop_top();

  size_t capacity_;
  size_t top_ = 0; // addresses from here on were never used
  size_t bytes_in_use_ = 0;
  FreeMap free_; // by offset
  std::set<std::pair<size_t, size_t>> by_size_; // (bytes, offset) of the free blocks
  std::unordered_map<size_t, size_t> taken_; // offset -> bytes
};

} // namespace fsdp::shm
