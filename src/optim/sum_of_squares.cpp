#include "optim/sum_of_squares.h"

#include <array>
#include <functional>

#include <ATen/Parallel.h>

#include "base/inline.h"

namespace fsdp::optim {
namespace {

// Enough sums beside each other that none waits for its own last addition.
constexpr int64_t kLanes = 32;

constexpr int64_t kFewestPerThread = 1 << 15;

template <typename T>
FSDP_INLINE double add_up(const T* values, int64_t count) {
  std::array<double, kLanes> lanes{};
  const int64_t whole = count - count % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = static_cast<float>(values[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (int64_t i = whole; i < count; ++i) {
    const double value = static_cast<float>(values[i]);
    lanes[i - whole] += value * value;
  }
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) {
      lanes[lane] += lanes[lane + width];
    }
  }
  return lanes[0];
}

#if defined(__x86_64__)
template <typename T>
__attribute__((target("avx2,fma"))) double add_up_avx2(const T* values, int64_t count) {
  return add_up(values, count);
}

template <typename T>
double add_up_fastest(const T* values, int64_t count) {
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return has_avx2 ? add_up_avx2(values, count) : add_up(values, count);
}
#else
template <typename T>
double add_up_fastest(const T* values, int64_t count) {
  return add_up(values, count);
}
#endif

template <typename T>
double add_up_in_parallel(const at::Tensor& tensor) {
  const T* values = tensor.const_data_ptr<T>();
  return at::parallel_reduce(
      0,
      tensor.numel(),
      kFewestPerThread,
      0.0,
      [values](int64_t begin, int64_t end, double sum) { return sum + add_up_fastest(values + begin, end - begin); },
      std::plus<double>());
}

} // namespace

bool has_sum_of_squares(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.is_non_overlapping_and_dense() &&
         (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16);
}

double sum_of_squares(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat ? add_up_in_parallel<float>(tensor)
                                            : add_up_in_parallel<at::BFloat16>(tensor);
}

} // namespace fsdp::optim
