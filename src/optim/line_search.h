#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

namespace fsdp::optim {

/// A place on a line: how far along it, and the function there.
struct LinePoint {
  double step;
  double value;
  double slope; ///< of the function along the line
  at::Tensor gradient;
};

struct LineSearchResult {
  LinePoint best;
  int64_t evaluations;
};

/// A step that fulfils the strong Wolfe conditions: the function is lower than at the start in proportion to the step,
/// and flatter. Brackets such a step, then narrows the bracket by cubic interpolation. Looks at values and slopes only,
/// so that ranks that see the same ones take the same way.
LineSearchResult strong_wolfe(
    const LinePoint& start,
    double first_step,
    double largest_in_direction,
    const std::function<LinePoint(double step)>& evaluate);

} // namespace fsdp::optim
