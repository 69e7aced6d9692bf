#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "comm/shm/blocks.h"
#include "comm/shm/members.h"
#include "comm/shm/segment.h"

namespace fsdp::shm {

/// One rank's progress, in shared memory, on a cache line of its own.
struct alignas(64) Progress {
  Counter value;
};

/// Memory of a group for what is gathered in another dtype than it is stored in. Every rank hands out the same regions
/// without a word to the others, since all gather and release in the same order; a region freed is used again without
/// page faults. It lives as long as homes use it. Same thread safety as Members.
class Scratch {
 public:
  struct Region {
    size_t offset;
    uint64_t free_since; ///< the release, counted on every rank, that freed the last of it
  };

  /// A segment for `size` ranks; one rank makes it, all open it.
  static std::shared_ptr<Segment> make_segment(int size);
  Scratch(Members& members, std::shared_ptr<Segment> segment);

  Region take(size_t bytes);
  /// Returns once all ranks have released what was in the region before.
  void await_free(const Region& region, const Label& label);
  void release(const Region& region);
  /// As `release`, at a moment and on a thread of this rank's own: it stays taken until all ranks reclaim it.
  void abandon(const Region& region);
  /// What was abandoned here; then all ranks' answers: what all have abandoned is free. Collective.
  std::string abandoned() const;
  void reclaim(const std::vector<std::string>& abandoned_of_ranks);

  char* writable(const Region& region) const {
    return segment_->writable() + region.offset;
  }
  const char* readable(const Region& region) const {
    return segment_->readable() + region.offset;
  }
  const SegmentId& id() const {
    return segment_->id();
  }
  /// Differs between ranks whose gathers and releases were not in the same order.
  uint64_t history() const {
    return history_;
  }

 private:
  static size_t header_bytes(int size);
  Counter& released(int rank) const; // releases of one rank so far
  void remember(uint64_t event, size_t offset);

  Members& members_;
  std::shared_ptr<Segment> segment_;
  Blocks blocks_;
  uint64_t releases_ = 0;
  uint64_t history_ = 0;
  mutable std::mutex mutex_; // of what is below
  std::set<size_t> abandoned_; // offsets
};

} // namespace fsdp::shm
