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

} // namespace fsdp::shm
