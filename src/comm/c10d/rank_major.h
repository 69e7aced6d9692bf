#pragma once

#include <cstdint>
#include <vector>

#include <fsdp/group.h>

namespace fsdp::adapter {

/// Whole tensors of one dtype as the rows of a [size, row] matrix: row r holds rank r's slices, each padded to its full
/// chunk.
class RankMajor {
 public:
  RankMajor(const ReduceScatter& args, int size);

  /// Elements of a row; in bytes a multiple of 16.
  int64_t row() const {
    return row_;
  }
  /// Where each tensor's slice begins in a row.
  const std::vector<int64_t>& offsets() const {
    return offsets_;
  }

  /// The bytes of all rows when a single tensor lies in memory just like that; undefined otherwise.
  at::Tensor as_it_is(const ReduceScatter& args) const;
  /// Copies the tensors into `matrix`, of size * row elements.
  void pack(const ReduceScatter& args, const at::Tensor& matrix) const;

 private:
  void pack_on_host(const ReduceScatter& args, const at::Tensor& matrix) const;
  void pack_on_device(const ReduceScatter& args, const at::Tensor& matrix) const;
  bool cuts_as_chunk_does(const ReduceScatter& args) const;

  int size_;
  std::vector<int64_t> offsets_;
  int64_t row_ = 0;
};

} // namespace fsdp::adapter
