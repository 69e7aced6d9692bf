#pragma once

#include <cstdint>
#include <vector>

#include <fsdp/group.h>

namespace fsdp {

/// Whole tensors of one dtype as the rows of a [size, row] matrix: row r holds rank r's slices, each padded to its full
/// chunk. What is cut as one, of one tensor or of many, makes a strip of columns.
class RankMajor {
 public:
  RankMajor(const ReduceScatter& args, int rank, int size);

  /// Elements of a row; in bytes a multiple of 16.
  int64_t row() const {
    return row_;
  }
  /// Where each tensor's slice begins in this rank's row.
  const std::vector<int64_t>& offsets() const {
    return offsets_;
  }

  /// The bytes of all rows when a single tensor lies in memory just like that; undefined otherwise.
  at::Tensor as_it_is(const ReduceScatter& args) const;
  /// Copies the tensors into `matrix`, of size * row elements.
  void pack(const ReduceScatter& args, const at::Tensor& matrix) const;
  /// The same on any device, with one kernel where `torch.chunk` cuts as the chunks say.
  void pack_by_operators(const ReduceScatter& args, const at::Tensor& matrix) const;

 private:
  struct Strip {
    int64_t column; ///< where it begins in a row
    int64_t chunk; ///< its width
    size_t last = 0; ///< of its tensors
    int64_t numel = 0; ///< as far as they reach
  };
  void pack_on_host(const ReduceScatter& args, const at::Tensor& matrix) const;
  /// The tensors as columns that `torch.chunk` cuts; empty if it does not cut one of them as the chunks say.
  std::vector<at::Tensor> columns(const ReduceScatter& args) const;
  /// Of so many ranks, the first, rows hold something.
  int64_t holders() const;

  int size_;
  std::vector<Strip> strips_;
  std::vector<int64_t> offsets_;
  int64_t row_ = 0;
  int64_t padding_ = 0; // at the end of each row
};

} // namespace fsdp
