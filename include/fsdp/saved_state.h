#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <fsdp/export.h>
#include <fsdp/held.h>
#include <fsdp/optim_state_dict.h>
#include <fsdp/safetensors.h>
#include <fsdp/save.h>
#include <fsdp/state_dict.h>

/// Checkpoints of other models than torch::nn's, by what a rank has of each tensor: the Python package is built on
/// this.
namespace fsdp {

/// What this rank has of the parameter behind a shard or a handle, with all that was written to that; of any other
/// tensor, the tensor.
FSDP_API HeldTensor held_behind(const at::Tensor& tensor);

/// Writes values of `from`, which has all that `to` has, into the tensor of `to`. Seen as any write.
FSDP_API void copy_elements(const HeldTensor& from, const HeldTensor& to);

/// A run, as far as one rank has it.
struct StateOfRank {
  ShardedStateDict model{};
  std::optional<ShardedOptimStateDict> optimizer{};
  std::map<std::string, c10::IValue> extra{}; ///< of the first rank
  c10::Device device{c10::kCPU}; ///< whose random numbers belong to the run, beside the CPU's
};

/// What the values of a checkpoint go into. An Error in any of these functions on one rank is one on all.
struct StateTarget {
  std::function<ShardedStateDict()> model{}; ///< what this rank has, and is going to be given
  bool with_optimizer = false;
  c10::Device device{c10::kCPU}; ///< as above
  /// Makes ready what was read: of the model what was asked for, and names without a tensor that it does not have; of
  /// the optimizer the states of the model's parameters, each cut as these are and in memory of its own. Nothing
  /// changes yet.
  std::function<void(StateOfRank read)> prepare{};
  std::function<void()> take_over{};
};

namespace saved_state {

/// As `fsdp::save`. An Error within `state` on one rank is one on all.
FSDP_API std::string save(
    const std::string& dir, int64_t step, const std::function<StateOfRank()>& state, const SaveOptions& options = {});

/// As `fsdp::load`.
FSDP_API LoadedState load(const std::string& dir, const StateTarget& target, const LoadOptions& options = {});

/// As the functions of these names.
FSDP_API void export_safetensors(
    const std::string& dir,
    const std::function<ShardedStateDict()>& model,
    const ExportSafetensorsOptions& options = {});
FSDP_API IncompatibleKeys import_safetensors(
    const std::string& path,
    const std::function<ShardedStateDict()>& model,
    const std::function<void(const ShardedStateDict& read)>& take_over,
    const ImportSafetensorsOptions& options = {});

} // namespace saved_state

} // namespace fsdp
