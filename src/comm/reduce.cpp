#include "comm/reduce.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

namespace fsdp {
namespace {

c10::ScalarType of_size(size_t bytes) {
  switch (bytes) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    default:
      return at::kLong;
  }
}

// LibTorch's threads are behind its iterators: at::parallel_for is a template, which would bring an OpenMP of ours.
void reduce_on_threads(const rank_order::Reduction& reduction) {
  const size_t size = rank_order::bytes_of(reduction.number);
  const at::Tensor result = at::from_blob(reduction.result, {reduction.count}, of_size(size));
  auto iterator =
      at::TensorIteratorConfig().add_output(result).check_all_same_dtype(false).resize_outputs(false).build();
  iterator.for_each([&](char** data, const int64_t*, int64_t count, int64_t rows) { // the rows follow one another
    const auto begin = (data[0] - static_cast<char*>(reduction.result)) / static_cast<int64_t>(size);
    rank_order::reduce(reduction, begin, begin + rows * count);
  });
}

} // namespace

void reduce(const rank_order::Reduction& reduction) {
  if (reduction.count <= at::internal::GRAIN_SIZE || at::get_num_threads() == 1) {
    rank_order::reduce(reduction, 0, reduction.count);
  } else {
    reduce_on_threads(reduction);
  }
}

} // namespace fsdp
