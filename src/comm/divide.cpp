#include "comm/divide.h"

#include <cmath>

#include <ATen/ops/div.h>
#include <c10/core/ScalarType.h>

namespace fsdp {

Division::Division(double divide_by, c10::ScalarType dtype, bool sum_may_overflow) : after(divide_by) {
  if (sum_may_overflow && dtype == at::kHalf && divide_by > 1) {
    before = std::exp2(std::floor(std::log2(divide_by) / 2));
    after = divide_by / before;
  }
}

void divide_(const at::Tensor& tensor, double by) {
  if (by == 1) {
    return;
  }
  if (c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) {
    tensor.copy_(tensor.to(at::kDouble).div_(by)); // the conversion rounds toward zero
  } else {
    tensor.div_(by);
  }
}

} // namespace fsdp
