#include "comm/shm/blocks.h"

#include <algorithm>
#include <bit>

#include "comm/shm/whole.h"

namespace fsdp::shm {
namespace {

// Nearby sizes share one size, so that a freed block fits the next request: at most 1/16 more, and whole pages. Of
// large blocks less: what is cut from one is of use to others.
size_t rounded(size_t bytes) {
  constexpr size_t kLargestStep = size_t{256} << 10;
  return whole(bytes, std::clamp(std::bit_floor(bytes) / 16, kPage, kLargestStep));
}

} // namespace

Blocks::Block Blocks::take(size_t bytes) {
  bytes = rounded(std::max<size_t>(bytes, 1));
  const auto fit = by_size_.lower_bound({bytes, 0});
  const Block block = fit != by_size_.end() ? cut(free_.find(fit->second), bytes) : extend(bytes);
  if (block.bytes > 0) {
    taken_[block.offset] = bytes;
    bytes_in_use_ += bytes;
  }
  return block;
}

Blocks::Block Blocks::cut(FreeMap::iterator free, size_t bytes) {
  const Block whole{free->first, free->second.bytes, free->second.stamp};
  erase_free(free);
  if (whole.bytes > bytes) {
    insert_free({whole.offset + bytes, whole.bytes - bytes, whole.stamp});
  }
  return {whole.offset, bytes, whole.stamp};
}

// Begins in the last free block, if nothing is in use behind it.
Blocks::Block Blocks::extend(size_t bytes) {
  Block block{top_, bytes, 0};
  const auto last = free_at_top();
  if (last != free_.end()) {
    block = {last->first, bytes, last->second.stamp};
  }
  if (bytes > capacity_ - block.offset) {
    return {0, 0, 0};
  }
  if (last != free_.end()) {
    erase_free(last);
  }
  top_ = block.offset + bytes;
  return block;
}

size_t Blocks::give_back(size_t offset, uint64_t stamp) {
  const auto found = taken_.find(offset);
  const size_t bytes = found->second;
  taken_.erase(found);
  bytes_in_use_ -= bytes;
  insert_free({offset, bytes, stamp});
  return bytes;
}

void Blocks::insert_free(Block block) {
  auto after = free_.lower_bound(block.offset);
  if (after != free_.end() && after->first == block.offset + block.bytes) {
    block.bytes += after->second.bytes;
    block.stamp = std::max(block.stamp, after->second.stamp);
    after = erase_free(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second.bytes == block.offset) {
      block = {before->first, before->second.bytes + block.bytes, std::max(block.stamp, before->second.stamp)};
      erase_free(before);
    }
  }
  free_[block.offset] = {block.bytes, block.stamp};
  by_size_.insert({block.bytes, block.offset});
}

Blocks::FreeMap::iterator Blocks::erase_free(FreeMap::iterator block) {
  by_size_.erase({block->second.bytes, block->first});
  return free_.erase(block);
}

Blocks::FreeMap::iterator Blocks::free_at_top() {
  const auto last = free_.empty() ? free_.end() : std::prev(free_.end());
  return last != free_.end() && last->first + last->second.bytes == top_ ? last : free_.end();
}

void Blocks::drop_top() {
  if (const auto last = free_at_top(); last != free_.end()) {
    top_ = last->first;
    erase_free(last);
  }
}

} // namespace fsdp::shm
