#pragma once

#include <memory>
#include <vector>

#include "comm/shm/arena.h"
#include "comm/shm/members.h"

namespace fsdp::shm {

/// What the ranks of a group can read of each other's memory, and how they name it: by its address where ranks are
/// threads, by its place in the arena where they are processes.
class Reach {
 public:
  /// `arenas[r]` is rank r's arena; null for ranks of this process.
  Reach(const Members& members, std::vector<std::shared_ptr<Segment>> arenas);

  bool covers(const void* memory) const {
    return one_process_ || Arena::of_process().contains(memory);
  }
  /// The word to publish for memory that is covered.
  uint64_t word(const void* memory) const;
  /// Where this process reads what rank `rank` published as `word`.
  const char* at(int rank, uint64_t word) const;

  /// Memory that the others can read, given back when the last pointer to it goes.
  std::shared_ptr<char> take(size_t bytes) const;

 private:
  bool one_process_;
  std::vector<std::shared_ptr<Segment>> arenas_;
};

/// Tensors of this rank that the others are to read, where they are if the others can see them there, else copied.
struct Publication {
  struct Part {
    const char* memory; ///< a whole tensor
    size_t bytes;
    size_t own_begin; ///< the bytes that nobody else needs
    size_t own_end;
  };

  /// Writes down in `post` where the parts are; at most `Post::kWords` of them, or a table.
  Publication(const Reach& reach, Post& post, const std::vector<Part>& parts);

  std::shared_ptr<char> block; ///< what holds copies and the table; empty if there was no need
  std::vector<char*> places; ///< where each part is read, and may be written: the tensor, or its copy

  /// Where this process finds part `index` of `count` of another rank.
  static const char* find(const Reach& reach, const Post& post, int rank, size_t index, size_t count);
};

} // namespace fsdp::shm
