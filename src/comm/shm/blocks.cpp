#include "comm/shm/blocks.h"

#include <algorithm>
#include <bit>

#include "comm/shm/whole.h"

namespace fsdp::shm {
namespace {

// Nearby sizes share one size, so that a freed block fits the next request: at most 1/16 more, and whole pages.
size_t rounded(size_t bytes) {
  const size_t step = std::max(kPage, std::bit_floor(bytes) / 16);
  return whole(bytes, step);
}

} // namespace

Blocks::Block Blocks::take(size_t bytes) {
  bytes = rounded(std::max<size_t>(bytes, 1));
  Block block{top_, bytes, 0};
  if (const auto fit = by_size_.lower_bound({bytes, 0}); fit != by_size_.end()) {
    const auto found = free_.find(fit->second);
    const Block whole{found->first, found->second.bytes, found->second.stamp};
    erase_free(found);
    if (whole.bytes > bytes) {
      insert_free({whole.offset + bytes, whole.bytes - bytes, whole.stamp});
    }
    block = {whole.offset, bytes, whole.stamp};
  } else if (bytes <= capacity_ - top_) {
    top_ += bytes;
  } else {
    return {0, 0, 0};
  }
  taken_[block.offset] = bytes;
  bytes_in_use_ += bytes;
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

void Blocks::drop_top() {
  if (!free_.empty() && std::prev(free_.end())->first + std::prev(free_.end())->second.bytes == top_) {
    const auto last = std::prev(free_.end());
    top_ = last->first;
    erase_free(last);
  }
}

} // namespace fsdp::shm
