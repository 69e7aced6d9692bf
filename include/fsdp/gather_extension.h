#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>

namespace fsdp {

/// How a parameter travels from its shards to the whole, where the shards' own values are not what is sent: fewer bytes
/// (a quantized copy, say), or several tensors. Given with a parameter's `ShardPlacement`. Its functions are called in
/// gathers, without recording gradients, on whatever thread touches the unit.
class FSDP_API GatherExtension {
 public:
  /// `tensor` is the whole parameter, `parts` the plain tensors it consists of, whose memory comes and goes with the
  /// gathers. A plain tensor of the parameter's sizes is its own and only part; then `tensor` may be left undefined,
  /// and the module keeps the tensor that it has.
  struct Whole {
    at::Tensor tensor;
    std::vector<at::Tensor> parts;
  };

  virtual ~GatherExtension();
  /// Tensors other than the shard that hold this rank's values: a write to one of them ends what was gathered.
  virtual std::vector<at::Tensor> stored();
  /// What this rank sends: of the same sizes and dtypes on every rank, and every time.
  virtual std::vector<at::Tensor> before_gather(const at::Tensor& shard) = 0;
  /// The whole parameter, from what was sent: `gathered[i]` are the ranks' i-th tensors, one after another along the
  /// first dimension; read only. As long as the same `tensor` is returned, its parts have the same sizes and dtypes.
  /// Not called for what was gathered ahead and is left unused.
  virtual Whole after_gather(const std::vector<at::Tensor>& gathered) = 0;
};

} // namespace fsdp
