#include "comm/shm/scratch.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/format.h"
#include "comm/memory_limit.h"
#include "comm/shm/whole.h"

namespace fsdp::shm {
namespace {

// Addresses only: as much as could ever be in memory.
size_t capacity() {
  return whole(std::max(size_t{1} << 30, memory_limit()), kPage);
}

} // namespace

size_t Scratch::header_bytes(int size) {
  return whole(sizeof(Progress) * static_cast<size_t>(size), kPage);
}

std::shared_ptr<Segment> Scratch::make_segment(int size) {
  return Segment::create("fsdp-gathered", header_bytes(size) + capacity(), Access::kReadAndWrite);
}

Scratch::Scratch(Members& members, std::shared_ptr<Segment> segment)
    : members_(members), segment_(std::move(segment)), blocks_(segment_->bytes()) {
  blocks_.take(header_bytes(members.size()));
}

Counter& Scratch::released(int rank) const {
  return reinterpret_cast<Progress*>(segment_->writable())[rank].value;
}

Scratch::Region Scratch::take(size_t bytes) {
  const Blocks::Block block = blocks_.take(bytes);
  FSDP_CHECK(
      block.bytes > 0,
      "[gather] no room for {} of gathered parameters: {} are in use; reshard units sooner",
      human_bytes(static_cast<int64_t>(bytes)),
      human_bytes(static_cast<int64_t>(blocks_.bytes_in_use())));
  remember(1, block.offset);
  return {block.offset, block.stamp};
}

void Scratch::await_free(const Region& region, const Label& label) {
  members_.await_all(label, [&](int r) { return released(r).load() >= region.free_since; });
}

void Scratch::release(const Region& region) {
  blocks_.give_back(region.offset, ++releases_);
  remember(2, region.offset);
  members_.publish(released(members_.rank()), releases_);
}

void Scratch::remember(uint64_t event, size_t offset) {
  history_ = (history_ ^ (event + offset)) * 0x9e3779b97f4a7c15;
}

} // namespace fsdp::shm
