#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>
#include <fsdp/gather_extension.h>
#include <fsdp/mesh.h>

namespace fsdp {

/// As a `reduce_dtype`: of each parameter the dtype that its shards have, whatever it is gathered in.
inline constexpr auto kShardDtype = c10::ScalarType::Undefined;

/// In which dtypes a unit computes and reduces. Unset: the parameters' own.
struct MixedPrecisionPolicy {
  std::optional<c10::ScalarType> param_dtype =
      std::nullopt; ///< of the handles, hence of gathers and compute; shards keep their own
  std::optional<c10::ScalarType> reduce_dtype =
      std::nullopt; ///< of gradient reduction and of unsynced gradients; unset: param_dtype
  std::optional<c10::ScalarType> output_dtype = std::nullopt; ///< of what `fsdp::call` returns
  bool cast_forward_inputs = true; ///< cast floating-point inputs to param_dtype where dtypes meet
};

/// Shards stay on the device.
struct OffloadPolicy {};

/// Shards, their gradients and the optimizer live in host memory.
struct CPUOffloadPolicy {
  bool pin_memory = true; ///< page-locked, for faster and asynchronous copies, where the device has such memory
};

/// When a unit's full parameters are freed between its forward and its backward.
class FSDP_API ReshardAfterForward {
 public:
  /// Unset: true, and false for a root.
  ReshardAfterForward() = default;
  ReshardAfterForward(std::nullopt_t) {}
  /// true: freed after forward and gathered again in backward. false: kept.
  ReshardAfterForward(bool reshard) : reshard_(reshard) {}
  /// Kept as 1/ranks of the whole, and gathered in backward among this many neighbouring ranks.
  ReshardAfterForward(int ranks) : reshard_(true), ranks_(ranks) {}

  std::optional<bool> reshard() const {
    return reshard_;
  }
  std::optional<int> ranks() const {
    return ranks_;
  }

 private:
  std::optional<bool> reshard_;
  std::optional<int> ranks_;
};

/// Along which dimension a parameter is cut, over which mesh if not its unit's, and how it is gathered if not as it is.
struct ShardPlacement {
  int64_t dim = 0;
  std::optional<Mesh> mesh = std::nullopt;
  std::shared_ptr<GatherExtension> extension = nullptr;
};

using ShardPlacementFn =
    std::function<std::optional<ShardPlacement>(const at::Tensor& parameter, const std::string& name)>;

struct FullyShardOptions {
  /// One dimension: sharded over it. Two, (replicate, shard): hybrid. Unset: all ranks of the job.
  std::optional<Mesh> mesh = std::nullopt;
  ReshardAfterForward reshard_after_forward = {};
  /// Unset, or an empty answer: dimension 0.
  ShardPlacementFn shard_placement_fn = nullptr;
  MixedPrecisionPolicy mp_policy = {};
  std::variant<OffloadPolicy, CPUOffloadPolicy> offload_policy = OffloadPolicy{};
  /// Left alone: neither sharded nor moved. So are buffers that are named here.
  std::vector<at::Tensor> ignored_params = {};
  /// Parameters, the ignored excepted, and all buffers get rank 0's values before they are sharded. Unset, every rank
  /// keeps its part of its own values, and a difference is warned of.
  bool sync_module_states = false;
};

} // namespace fsdp
