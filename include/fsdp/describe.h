#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <fsdp/export.h>
#include <fsdp/module_ref.h>

namespace fsdp {

class FSDPModule;

struct UnitDescription {
  std::string name; ///< "(root)" for a root
  int64_t parameters = 0; ///< tensors
  int64_t numel = 0; ///< of the whole parameters
  int64_t bytes_whole = 0; ///< gathered
  int64_t bytes_shard = 0; ///< on this rank
  std::string dtype; ///< "float32", or "float32 -> bfloat16" where compute and shards differ
  std::string mesh;
  std::string policy; ///< "reshard", "keep", "reshard to 2"; "offload"
};

struct FSDP_API Description {
  std::vector<UnitDescription> units;
  int64_t bytes_shard = 0; ///< all shards of this rank
  /// The most that parameters and gradients take on this rank at any time of a step: shards, their gradients, whole
  /// units, gradients in flight. Optimizer state comes on top, and what collectives need for themselves: a buffer of a
  /// unit's size over c10d; nothing on shared memory, but for copies of gradients that are not in the memory that ranks
  /// share (small ones).
  int64_t bytes_peak = 0;
  /// A table for people.
  std::string str() const;
};

/// The units of a sharded model and the memory they need.
FSDP_API Description describe(ConstModuleRef module);
/// The same of a unit and those below it.
FSDP_API Description describe(const FSDPModule& module);

} // namespace fsdp
