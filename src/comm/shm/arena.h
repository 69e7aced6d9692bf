#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "comm/shm/blocks.h"
#include "comm/shm/segment.h"

namespace fsdp::shm {

/// Memory of this process that the other ranks can read: one segment, handed out in blocks.
/// Tensors that lie in it need not be copied for others to read them. One per process; never destroyed, since LibTorch
/// may free its blocks as late as at exit. Thread safe.
class Arena {
 public:
  static constexpr size_t kSmallestBlock = size_t{128} << 10; ///< smaller tensors come from the ordinary allocator

  static Arena& of_process();

  /// Of addresses. It is smaller where there are not so many.
  static size_t wanted_bytes();

  const SegmentId& id() const;
  /// How much tensors may take by default: a quarter is left for what has to be copied for others.
  static size_t share_for_tensors(size_t memory, int processes_on_host, size_t capacity);
  /// LibTorch's big CPU tensors may lie here, up to a share of the machine's memory. Idempotent, as is the next.
  void offer_to_tensors(int processes_on_host);
  /// From now on they do. Not earlier: what is sharded once and for all need not be read by others, and its pages cost
  /// more here than elsewhere, and more to give back.
  void serve_tensors();

  /// A block that others can read, whatever the cap.
  void* take(size_t bytes);
  /// As `take`, but null beyond the cap or before `serve_tensors`.
  void* take_for_tensor(size_t bytes);
  void give_back(void* memory);

  bool contains(const void* memory) const {
    return static_cast<const char*>(memory) >= base_ && static_cast<const char*>(memory) < base_ + capacity_;
  }
  const char* base() const {
    return base_;
  }
  uint64_t offset(const void* memory) const {
    return static_cast<uint64_t>(static_cast<const char*>(memory) - base_);
  }
  /// While somebody holds what this returns, all freed blocks are kept for the next request. Otherwise only a few are,
  /// and memory goes back to the system.
  std::shared_ptr<void> keep_freed();
  size_t bytes_in_use() const;

 private:
  Arena();
  void* take_block(size_t bytes);
  void drop_kept();

  mutable std::mutex mutex_;
  std::shared_ptr<Segment> segment_;
  char* base_;
  size_t capacity_;
  Blocks blocks_;
  size_t share_ = 0; // that tensors may take once they are served
  size_t cap_ = 0; // for tensors
  int keepers_ = 0; // who want freed blocks kept
  size_t kept_ = 0; // about as many bytes of free blocks hold memory
  bool inherited_ = false; // by fork: the memory is the parent's
};

} // namespace fsdp::shm
