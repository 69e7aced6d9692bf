#include "optim/adamw_kernel.h"

#include <cmath>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include "base/inline.h"

namespace fsdp::optim {
namespace {

template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename C>
struct Factors {
  C decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, minus_step_size, correction;

  explicit Factors(const AdamWFactors& f)
      : decay(static_cast<C>(f.decay)),
        beta1(static_cast<C>(f.beta1)),
        one_minus_beta1(static_cast<C>(1 - f.beta1)),
        beta2(static_cast<C>(f.beta2)),
        one_minus_beta2(static_cast<C>(1 - f.beta2)),
        eps(static_cast<C>(f.eps)),
        minus_step_size(static_cast<C>(-f.step_size)),
        correction(static_cast<C>(f.correction)) {}
};

// `kFused` rounds once, as LibTorch's own loops do on the same processors; without the instruction it would be a slow
// call.
template <bool kFused, typename C>
FSDP_INLINE C multiply_add(C a, C b, C c) {
  if constexpr (kFused) {
    return std::fma(a, b, c);
  } else {
    return a * b + c;
  }
}

// Not-a-number from either side stays.
template <typename C>
FSDP_INLINE C larger(C a, C b) {
  return a != a || a >= b ? a : b;
}

template <typename T, bool kFused, bool kAmsgrad>
FSDP_INLINE void update_loop(const AdamWSpan& span, int64_t count, const Factors<Compute<T>>& f) {
  using C = Compute<T>;
  T* __restrict param = static_cast<T*>(span.param);
  const T* __restrict grad = static_cast<const T*>(span.grad);
  T* __restrict exp_avg = static_cast<T*>(span.exp_avg);
  T* __restrict exp_avg_sq = static_cast<T*>(span.exp_avg_sq);
  T* __restrict max_exp_avg_sq = static_cast<T*>(span.max_exp_avg_sq);
  for (int64_t i = 0; i < count; ++i) {
    const C g = static_cast<C>(grad[i]);
    const C mean = multiply_add<kFused>(g, f.one_minus_beta1, static_cast<C>(exp_avg[i]) * f.beta1);
    const C square = multiply_add<kFused>(f.one_minus_beta2 * g, g, static_cast<C>(exp_avg_sq[i]) * f.beta2);
    exp_avg[i] = static_cast<T>(mean);
    exp_avg_sq[i] = static_cast<T>(square);
    C scale = square;
    if constexpr (kAmsgrad) {
      scale = larger(static_cast<C>(max_exp_avg_sq[i]), square);
      max_exp_avg_sq[i] = static_cast<T>(scale);
    }
    const C denominator = std::sqrt(scale) / f.correction + f.eps;
    param[i] = static_cast<T>(static_cast<C>(param[i]) * f.decay + f.minus_step_size * mean / denominator);
  }
}

template <typename T, bool kFused>
FSDP_INLINE void update_either(const AdamWSpan& span, int64_t count, const Factors<Compute<T>>& factors) {
  if (span.max_exp_avg_sq != nullptr) {
    update_loop<T, kFused, true>(span, count, factors);
  } else {
    update_loop<T, kFused, false>(span, count, factors);
  }
}

#if defined(__x86_64__)
template <typename T>
__attribute__((target("avx2,fma,f16c"))) void update_avx2(
    const AdamWSpan& span, int64_t count, const Factors<Compute<T>>& factors) {
  update_either<T, true>(span, count, factors);
}

template <typename T>
void update(const AdamWSpan& span, int64_t count, const Factors<Compute<T>>& factors) {
  // Every CPU with AVX2 has F16C, of which clang 14 cannot ask.
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) {
    update_avx2<T>(span, count, factors);
  } else {
    update_either<T, false>(span, count, factors);
  }
}
#else
template <typename T>
void update(const AdamWSpan& span, int64_t count, const Factors<Compute<T>>& factors) {
#if defined(__FP_FAST_FMAF)
  update_either<T, true>(span, count, factors);
#else
  update_either<T, false>(span, count, factors);
#endif
}
#endif

} // namespace

bool has_adamw_kernel(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kDouble || dtype == c10::kBFloat16 || dtype == c10::kHalf;
}

void adamw_update(c10::ScalarType dtype, const AdamWSpan& span, int64_t count, const AdamWFactors& factors) {
  switch (dtype) {
    case c10::kFloat:
      return update<float>(span, count, Factors<float>(factors));
    case c10::kDouble:
      return update<double>(span, count, Factors<double>(factors));
    case c10::kBFloat16:
      return update<c10::BFloat16>(span, count, Factors<float>(factors));
    case c10::kHalf:
      return update<c10::Half>(span, count, Factors<float>(factors));
    default:
      TORCH_INTERNAL_ASSERT(false, "no AdamW kernel for ", dtype);
  }
}

} // namespace fsdp::optim
