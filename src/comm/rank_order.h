#pragma once

#include <cstdint>

/// Sums over ranks. Free of LibTorch's headers; the file is compiled for several instruction sets.
namespace fsdp::rank_order {

enum class Number { kFloat, kDouble, kHalf, kBFloat16, kInt8, kUInt8, kInt16, kInt32, kInt64, kBool };
enum class Combine { kSum, kMax, kMin };

struct Reduction {
  Number number;
  Combine combine = Combine::kSum;
  double divide_by = 1; ///< a true division at the end; skipped if 1

  const void* const* sources; ///< one per rank
  int count_sources;
  void* result; ///< may be one of the sources
  int64_t count; ///< numbers
};

/// For `begin <= i < end`: result[i] = (((sources[0][i] + sources[1][i]) + sources[2][i]) + ...) / divide_by: always in
/// this order, so the bits do not depend on which rank does it. Half types are summed in float and rounded once, at the
/// end. Bool sums are "any".
void reduce(const Reduction& reduction, int64_t begin, int64_t end);
/// The same with the instructions that every CPU has. Equal bits.
void reduce_baseline(const Reduction& reduction, int64_t begin, int64_t end);

} // namespace fsdp::rank_order
