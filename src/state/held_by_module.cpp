#include <fsdp/held.h>

#include "engine/unit.h"
#include "state/named_tensors.h"

namespace fsdp {

std::vector<HeldTensor> held(ModuleRef module) {
  const auto tensors = state::named_tensors(module, "held");
  for (const auto& unit : state::units_of(tensors)) {
    unit->before_shard_read(); // what was written to handles is in the shards
  }
  const bool first_rank = state::is_first_rank(tensors);
  std::vector<HeldTensor> all;
  for (const auto& tensor : tensors) {
    if (!tensor.is_buffer) {
      all.push_back(state::held(tensor, first_rank));
    }
  }
  return all;
}

} // namespace fsdp
