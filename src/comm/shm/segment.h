#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fsdp::shm {

/// Where another process finds a segment. Plain data: travels as bytes.
struct SegmentId {
  int32_t pid = 0;
  int32_t fd = -1;
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
};

/// Ends a mapping of this process.
struct Unmap {
  size_t bytes = 0;
  void operator()(char* memory) const;
};
using Mapping = std::unique_ptr<char, Unmap>;

enum class Access { kRead, kWrite, kReadAndWrite };

/// Memory that ranks share: a memfd and this process's mappings of it. A memfd has no name in any file system, so
/// nothing is left behind however the processes end. Ranks that are threads of one process get one and the same
/// Segment. Immutable after creation except for `hide` and `keep_in_children`; thread safe.
///
/// [Note: forked children] A forked child would see what its parent and the other ranks go on writing, and could write
/// there itself. So a segment is not there in a child: its addresses are kept, and to touch them ends the child with a
/// SIGSEGV and a word on why. To copy what is there instead would cost each worker that a program forks a copy of the
/// model's shards.
class Segment {
 public:
  /// A new segment of zeros; pages come with the first write.
  static std::shared_ptr<Segment> create(const char* name, size_t bytes, Access access);
  /// A segment that a rank of this host has created and not hidden yet. What others say of it is checked: that it is a
  /// memfd of this user which cannot become smaller, and is as big as announced.
  static std::shared_ptr<Segment> open(const SegmentId& id, Access access);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const SegmentId& id() const {
    return id_;
  }
  size_t bytes() const {
    return id_.bytes;
  }
  /// The mapping that may be written; null unless opened with it.
  char* writable() const {
    return writable_.get();
  }
  /// The mapping that may only be read, if opened with it, else the writable one.
  const char* readable() const {
    return readable_ ? readable_.get() : writable_.get();
  }
  /// Closes the creator's descriptor: from now on nobody can open the segment. Idempotent.
  void hide();
  /// Before others know of it: forked children see this segment, on pages of their own as soon as they write.
  void keep_in_children() {
    kept_in_children_ = true;
  }
  /// Gives the pages of a range back to the system; they read as zeros. For the creator, before `hide`.
  void punch(size_t offset, size_t bytes) const;

 private:
  friend struct Registry;
  Segment(const SegmentId& id, int fd, Access access);
  void part_from_parent(char* mapping) const;

  SegmentId id_;
  int own_fd_ = -1; // of the creator, until hidden
  bool kept_in_children_ = false;
  bool has_parted_ = false; // in a forked child
  Mapping writable_, readable_;
};

} // namespace fsdp::shm
