#pragma once

#include <memory>
#include <vector>

#include "comm/shm/core.h"

namespace fsdp::shm {

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
