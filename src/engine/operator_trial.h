#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include "engine/given_tensors.h"

namespace fsdp::engine {

/// An operator's call with other tensors, to see what its results look like.
struct OperatorTrial {
  std::vector<at::Tensor> given; ///< in place of each of the call's
  torch::jit::Stack returned;
  bool on_values; ///< it really ran, on memory that goes with the trial
};

/// On stand-ins, if the operator can do without values and they tell all that is asked.
OperatorTrial try_operator(const GivenTensors& call);
/// On values: then random numbers are drawn.
OperatorTrial try_operator_on_values(const GivenTensors& call);

/// All tensors that it returned are views of what it was given.
bool returned_views(const OperatorTrial& trial);

} // namespace fsdp::engine
