#pragma once

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>

namespace fsdp {

/// What users are shown in place of a shard's own tensor: in Python, a DTensor around it. `requires_grad`, the gradient
/// and its hooks are its, not the shard's. Called by the engine, from whatever thread runs backward.
class FSDP_API ShownShard {
 public:
  virtual ~ShownShard();
  virtual bool requires_grad() const = 0;
  /// As users have set it on the handle.
  virtual void set_requires_grad(bool requires_grad) = 0;
  /// This rank's piece of the gradient; undefined if there is none.
  virtual at::Tensor gradient() const = 0;
  /// Adds to the gradient, or becomes it; then runs the hooks that wait for it.
  virtual void give_gradient(at::Tensor piece) = 0;
  /// Whether users put other data behind it since the shard was made, or since `replacement` was called. Asked before
  /// every operator on the parameter.
  virtual bool replaced() const = 0;
  /// The data that is behind it now: becomes the shard.
  virtual at::Tensor replacement() = 0;
};

/// For what shows a plain tensor: as autograd accumulates, hooks included.
FSDP_API void give_gradient_to(const at::Tensor& parameter, at::Tensor gradient);

} // namespace fsdp
