#include "comm/rank_order.h"

#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>

#include "base/inline.h"

namespace fsdp::rank_order {
namespace {

// Small enough for a block of the result to stay in the first-level cache while each rank's numbers are added to it.
constexpr int64_t kBlock = 2048;

// Half types, stored as their bits. The conversions are branch-free integer arithmetic, so that they vectorize
// anywhere.
struct BFloat16 {
  uint16_t bits;
};

struct Half {
  uint16_t bits;
};

// How a stored type is computed with.
template <typename Stored>
using Computed = std::conditional_t<std::is_arithmetic_v<Stored>, Stored, float>;

template <typename T>
FSDP_INLINE T load(T value) {
  return value;
}
template <typename Stored>
FSDP_INLINE Stored store(Computed<Stored> value) {
  return value;
}

FSDP_INLINE float load(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

template <>
FSDP_INLINE BFloat16 store<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t to_nearest_even = 0x7fff + ((bits >> 16) & 1);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return {static_cast<uint16_t>(is_nan ? 0x7fc0 : (bits + to_nearest_even) >> 16)};
}

// Normal numbers: exponent and mantissa move to their places in a float and the exponent's bias is corrected. Subnormal
// ones are integers times 2^-24.
FSDP_INLINE float load(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t exponent = value.bits & 0x7c00;
  const uint32_t shifted = static_cast<uint32_t>(value.bits & 0x7fff) << 13;
  const uint32_t normal = shifted + (exponent == 0x7c00 ? 0x70000000u : 0x38000000u); // infinity and NaN: all ones
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(value.bits & 0x3ff)) * 0x1p-24f);
  return std::bit_cast<float>(sign | (exponent == 0 ? subnormal : normal));
}

// Three cases, each computed and one chosen: too big or NaN, subnormal (an addition rounds at the right place), normal.
template <>
FSDP_INLINE Half store<Half>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  return {static_cast<uint16_t>(sign | (magnitude >= 0x477ff000 ? special : finite))};
}

struct Sum {
  template <typename T>
  static FSDP_INLINE T of(T a, T b) {
    if constexpr (std::is_same_v<T, bool>) {
      return a || b;
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); // wraps around, as torch's does
    } else {
      return a + b;
    }
  }
};

// A NaN on any rank is the result, as in torch.
struct Max {
  template <typename T>
  static FSDP_INLINE T of(T a, T b) {
    return (a < b || b != b) ? b : a;
  }
};

struct Min {
  template <typename T>
  static FSDP_INLINE T of(T a, T b) {
    return (b < a || b != b) ? b : a;
  }
};

template <typename T>
FSDP_INLINE T divided(T value, double divisor) {
  if constexpr (std::is_floating_point_v<T>) {
    return value / static_cast<T>(divisor);
  } else {
    return static_cast<T>(static_cast<double>(value) / divisor);
  }
}

// One block: every source is read once, the sums stay in the cache.
template <typename Stored, typename Operation>
FSDP_INLINE void reduce_block(const Reduction& reduction, int64_t begin, int64_t count) {
  using Number = Computed<Stored>;
  alignas(64) std::array<Number, kBlock> sums;
  const auto source = [&](int rank) { return static_cast<const Stored*>(reduction.sources[rank]) + begin; };
  const Stored* first = source(0);
  for (int64_t i = 0; i < count; ++i) {
    sums[i] = load(first[i]);
  }
  for (int rank = 1; rank < reduction.count_sources; ++rank) {
    const Stored* next = source(rank);
    for (int64_t i = 0; i < count; ++i) {
      sums[i] = Operation::template of<Number>(sums[i], load(next[i]));
    }
    // Else GCC adds two ranks' numbers in one loop (-floop-unroll-and-jam), which it does not vectorize.
    asm volatile("");
  }
  if (reduction.divide_by != 1) {
    for (int64_t i = 0; i < count; ++i) {
      sums[i] = divided<Number>(sums[i], reduction.divide_by);
    }
  }
  Stored* result = static_cast<Stored*>(reduction.result) + begin;
  for (int64_t i = 0; i < count; ++i) {
    result[i] = store<Stored>(sums[i]);
  }
}

template <typename Stored, typename Operation>
FSDP_INLINE void reduce_as(const Reduction& reduction, int64_t begin, int64_t end) {
  for (; begin < end; begin += kBlock) {
    reduce_block<Stored, Operation>(reduction, begin, std::min(kBlock, end - begin));
  }
}

template <typename Stored>
FSDP_INLINE void reduce_by(const Reduction& reduction, int64_t begin, int64_t end) {
  switch (reduction.combine) {
    case Combine::kSum:
      return reduce_as<Stored, Sum>(reduction, begin, end);
    case Combine::kMax:
      return reduce_as<Stored, Max>(reduction, begin, end);
    case Combine::kMin:
      return reduce_as<Stored, Min>(reduction, begin, end);
  }
}

FSDP_INLINE void reduce_any(const Reduction& reduction, int64_t begin, int64_t end) {
  switch (reduction.number) {
    case Number::kFloat:
      return reduce_by<float>(reduction, begin, end);
    case Number::kDouble:
      return reduce_by<double>(reduction, begin, end);
    case Number::kHalf:
      return reduce_by<Half>(reduction, begin, end);
    case Number::kBFloat16:
      return reduce_by<BFloat16>(reduction, begin, end);
    case Number::kInt8:
      return reduce_by<int8_t>(reduction, begin, end);
    case Number::kUInt8:
      return reduce_by<uint8_t>(reduction, begin, end);
    case Number::kInt16:
      return reduce_by<int16_t>(reduction, begin, end);
    case Number::kInt32:
      return reduce_by<int32_t>(reduction, begin, end);
    case Number::kInt64:
      return reduce_by<int64_t>(reduction, begin, end);
    case Number::kBool:
      return reduce_by<bool>(reduction, begin, end);
  }
}

} // namespace

void reduce_baseline(const Reduction& reduction, int64_t begin, int64_t end) {
  reduce_any(reduction, begin, end);
}

namespace {

using Kernel = void (*)(const Reduction&, int64_t, int64_t);

#if defined(__x86_64__)
__attribute__((target("avx2"))) void reduce_avx2(const Reduction& reduction, int64_t begin, int64_t end) {
  reduce_any(reduction, begin, end);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))) void reduce_avx512(
    const Reduction& reduction, int64_t begin, int64_t end) {
  reduce_any(reduction, begin, end);
}

Kernel best_kernel() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    return &reduce_avx512;
  }
  return __builtin_cpu_supports("avx2") ? &reduce_avx2 : &reduce_baseline;
}
#else
Kernel best_kernel() {
  return &reduce_baseline;
}
#endif

} // namespace

void reduce(const Reduction& reduction, int64_t begin, int64_t end) {
  static const Kernel kernel = best_kernel();
  kernel(reduction, begin, end);
}

} // namespace fsdp::rank_order
