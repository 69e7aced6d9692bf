#include "checkpoint/rows_in_file.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty_strided.h>

#include "checkpoint/stored_elements.h"
#include "engine/internal_scope.h"
#include "layout/param_layout.h"
#include "state/named_tensors.h"

namespace fsdp::disk {

namespace {

bool lies_row_by_row(const HeldTensor& held) {
  const auto contiguous = layout::contiguous_strides(held.sizes);
  for (size_t d = 0; d < held.sizes.size(); ++d) {
    if (held.sizes[d] > 1 && held.strides[d] != contiguous[d]) {
      return false;
    }
  }
  return true;
}

/// Whether it has whole columns of a matrix that lies column by column.
bool has_columns(const HeldTensor& held) {
  const Extent& extent = held.extent;
  return held.sizes.size() == 2 && held.sizes[0] > 0 && held.strides == std::vector<int64_t>{1, held.sizes[0]} &&
         extent.count == 1 && extent.first % held.sizes[0] == 0 && extent.run % held.sizes[0] == 0;
}

RowsInFile rows_of_columns(const HeldTensor& held, const at::Tensor& elements) {
  const int64_t height = held.sizes[0], width = held.sizes[1];
  const int64_t first = held.extent.first / height, columns = held.extent.run / height;
  RowsInFile rows{elements.view({columns, height}).t().reshape({-1})};
  for (int64_t row = 0; row < height; ++row) {
    rows.runs.push_back({row * columns, row * width + first, columns});
  }
  return rows;
}

void add(std::vector<RowsInFile::Run>& runs, const RowsInFile::Run& next) {
  if (!runs.empty() && runs.back().from + runs.back().length == next.from &&
      runs.back().to + runs.back().length == next.to) {
    runs.back().length += next.length;
  } else {
    runs.push_back(next);
  }
}

// Where each element that is here lies in the rows, in the order in which it lies in memory.
at::Tensor places_of(const HeldTensor& held) {
  const Extent& extent = held.extent;
  at::Tensor places = at::empty_strided(held.sizes, held.strides, at::TensorOptions().dtype(at::kLong));
  places.copy_(at::arange(places.numel(), at::kLong).view(held.sizes));
  return places.as_strided({extent.count, extent.run}, {extent.stride, 1}, extent.first).reshape({-1});
}

} // namespace

RowsInFile rows_in_file(const HeldTensor& held) {
  const engine::InternalScope scope;
  const Extent& extent = held.extent;
  RowsInFile rows{stored(layout::in_memory_order(state::as_piece(held)).detach().reshape({-1}))};
  if (extent.numel() == 0) {
    return rows;
  }
  if (lies_row_by_row(held)) {
    for (int64_t i = 0; i < extent.count; ++i) {
      rows.runs.push_back({i * extent.run, extent.first + i * extent.stride, extent.run});
    }
    return rows;
  }
  if (has_columns(held)) {
    return rows_of_columns(held, rows.elements);
  }
  const at::Tensor places = places_of(held), order = places.argsort();
  rows.elements = rows.elements.index_select(0, order);
  const at::Tensor sorted = places.index_select(0, order);
  const auto* place = sorted.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < sorted.numel(); ++i) {
    add(rows.runs, {i, place[i], 1});
  }
  return rows;
}

} // namespace fsdp::disk
