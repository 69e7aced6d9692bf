#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/group.h>

#include "engine/param.h"

namespace fsdp::engine {

/// This rank's piece of a parameter, or of what is cut as the parameter is: its gradient.
struct PieceOf {
  const Param* param;
  at::Tensor local;
};

/// The wholes of which all ranks give their pieces, in the pieces' dtypes and the parameters' own strides, on `target`.
/// Of parameters that lie on one mesh. Collective.
std::vector<at::Tensor> put_together(const std::vector<PieceOf>& pieces, c10::Device target, const Label& label);

} // namespace fsdp::engine
