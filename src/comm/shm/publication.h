#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/reduce.h"
#include "comm/shm/core.h"

namespace fsdp::shm {

using rank_order::bytes_of;
using rank_order::Combine;
using rank_order::Number;
using rank_order::Reduction;

/// Tensors of this rank that the others are to read, where they are if the others can see them there, else copied.
class Publication {
 public:
  struct Part {
    const char* memory; ///< a whole tensor
    size_t bytes;
    size_t own_begin; ///< the bytes that nobody else needs
    size_t own_end;
  };

  explicit Publication(const Reach& reach) : reach_(reach) {}

  /// Writes down in `post` where the parts are; at most `Post::kWords` of them, or a table.
  void publish(Post& post, const std::vector<Part>& parts);
  /// What holds copies and the table; empty if there was no need.
  std::shared_ptr<char> block() const {
    return block_;
  }
  /// Where part `index` of this rank is read, and may be written: the tensor, or its copy.
  char* place(size_t index) const {
    return places_[index];
  }

  /// Where this process finds part `index` of `count` of another rank.
  static const char* find(const Reach& reach, const Post& post, int rank, size_t index, size_t count);

 private:
  const Reach& reach_;
  std::shared_ptr<char> block_;
  std::vector<char*> places_;
};

} // namespace fsdp::shm
