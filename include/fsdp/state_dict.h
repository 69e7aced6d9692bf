#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include <fsdp/export.h>
#include <fsdp/held.h>
#include <fsdp/module_ref.h>

namespace fsdp {

/// Values by the names that the unsharded model has; a tensor that has several names is there under each.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

struct FullStateDictOptions {
  bool rank0_only = false; ///< the others get an empty one
  bool offload_to_cpu = false; ///< in host memory, whatever the mesh's device is
};

/// The whole parameters, in the dtypes in which they are trained, and the buffers: copies, which training does not
/// change. They are put together unit by unit, so that beside the result no more than one unit is whole. The same from
/// whatever sharding; also of a model that is not sharded. Collective.
FSDP_API StateDict full_state_dict(ModuleRef module, const FullStateDictOptions& options = {});

struct LoadStateDictOptions {
  bool strict = true; ///< names that are missing, or too many, are an error
  bool broadcast_from_rank0 = false; ///< the other ranks give an empty one, and get the first's values
};

/// What was not loaded.
struct IncompatibleKeys {
  std::vector<std::string> missing; ///< in the model only
  std::vector<std::string> unexpected; ///< in the state dict only
};

/// Copies whole values into a model, sharded or not; of a sharded parameter each rank takes its piece. Nothing is
/// written if there is an error. With `broadcast_from_rank0` collective, and then one tensor at a time is whole.
FSDP_API IncompatibleKeys
load_state_dict(ModuleRef module, const StateDict& state, const LoadStateDictOptions& options = {});

/// What a rank has of each tensor of a model, by name.
using ShardedStateDict = torch::OrderedDict<std::string, HeldTensor>;

/// This rank's pieces of the parameters, and the buffers. No copies: they change as training goes on. Nothing is
/// communicated, as by `held`.
FSDP_API ShardedStateDict sharded_state_dict(ModuleRef module);

/// Copies pieces into a model, which has to hold no more of each tensor than they do: one that is sharded in the same
/// way or, from pieces that are whole, in any. Nothing is written if there is an error, on this rank. Not collective.
FSDP_API IncompatibleKeys
load_state_dict(ModuleRef module, const ShardedStateDict& state, const LoadStateDictOptions& options = {});

} // namespace fsdp
