#include "checkpoint/transposed.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "engine/internal_scope.h"
#include "layout/param_layout.h"
#include "state/named_tensors.h"

namespace fsdp::disk {

namespace {

struct Rectangle {
  int64_t first_row = 0, rows = 0;
  int64_t first_column = 0, columns = 0;
};

/// The smallest that has all elements of an extent, in a matrix that lies row by row.
Rectangle around(const Extent& extent, int64_t columns) {
  if (extent.numel() == 0) {
    return {};
  }
  const int64_t first_row = extent.first / columns, first_column = extent.first % columns;
  const int64_t last = extent.first + (extent.count - 1) * extent.stride + extent.run - 1;
  const int64_t rows = last / columns + 1 - first_row;
  const bool same_columns = extent.count == 1 ? rows == 1 : extent.stride == columns;
  if (same_columns && first_column + extent.run <= columns) {
    return {first_row, rows, first_column, extent.run};
  }
  return {first_row, rows, 0, columns};
}

Extent extent_of(const Extent& runs) {
  if (runs.numel() == 0) {
    return {};
  }
  return runs.run == runs.stride || runs.count == 1 ? Extent::one_run(runs.first, runs.numel()) : runs;
}

bool lies_row_by_row(const HeldTensor& matrix) {
  return matrix.strides == layout::contiguous_strides(matrix.sizes);
}

/// All of a rectangle, in the matrix' order.
at::Tensor read_rectangle(
    PieceReader& reader, const std::string& name, const HeldTensor& here, const Rectangle& rectangle) {
  const int64_t height = here.sizes[0];
  HeldTensor in_file = here;
  in_file.strides = {1, height};
  in_file.extent =
      extent_of({rectangle.first_column * height + rectangle.first_row, rectangle.rows, height, rectangle.columns});
  in_file.local = at::empty({rectangle.rows * rectangle.columns}, at::TensorOptions().dtype(here.dtype()));
  const at::Tensor columns = reader.read(name, in_file).local;
  return columns.view({rectangle.columns, rectangle.rows}).t().reshape({-1});
}

} // namespace

HeldTensor transposed(const HeldTensor& matrix) {
  HeldTensor other = matrix;
  std::swap(other.sizes[0], other.sizes[1]);
  std::swap(other.strides[0], other.strides[1]);
  if (matrix.local.dim() == 2) {
    const engine::InternalScope scope;
    other.local = matrix.local.detach().t();
  }
  return other;
}

IndexedTensor transposed(const IndexedTensor& matrix) {
  IndexedTensor other = matrix;
  std::swap(other.sizes[0], other.sizes[1]);
  std::swap(other.strides[0], other.strides[1]);
  return other;
}

HeldTensor read_transposed(PieceReader& reader, const std::string& name, const HeldTensor& here) {
  if (here.sizes.size() != 2 || !lies_row_by_row(here)) {
    return reader.read(name, here); // which lies as in the file, or does not fit
  }
  const engine::InternalScope scope;
  const int64_t width = here.sizes[1];
  const Rectangle rectangle = around(here.extent, width);
  const Extent extent =
      extent_of({rectangle.first_row * width + rectangle.first_column, rectangle.columns, width, rectangle.rows});
  const at::Tensor elements = read_rectangle(reader, name, here, rectangle);
  HeldTensor there = here;
  there.local = at::empty_strided(here.local.sizes(), here.local.strides(), elements.options());
  there.local = layout::taken_from({here.sizes, here.strides, extent, elements}, state::as_piece(there));
  return there;
}

} // namespace fsdp::disk
