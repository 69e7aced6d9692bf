#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>
#include <fsdp/module_ref.h>

namespace fsdp {

struct ClipOptions {
  double norm_type = 2.0; ///< 1, 2, any p, or infinity
  bool error_if_nonfinite = false;
};

/// Scales all gradients so that the norm of the whole model's gradient is at most `max_norm`; returns that norm, the
/// same on every rank where plain parameters' gradients are. Sharded, replicated and plain ones may be mixed.
/// Collective. Squares are added in float64, so that the norm does not depend on how gradients are cut; LibTorch adds
/// those of float32 in float32. For tensors of up to a million elements its norm, and so its clipped gradients, were
/// found to differ by 1e-5 of themselves.
FSDP_API at::Tensor clip_grad_norm_(ConstModuleRef module, double max_norm, const ClipOptions& options = {});
FSDP_API at::Tensor clip_grad_norm_(
    const std::vector<at::Tensor>& parameters, double max_norm, const ClipOptions& options = {});

} // namespace fsdp
