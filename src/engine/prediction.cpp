#include "engine/prediction.h"

#include <algorithm>

#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine::prediction {

namespace {

int64_t gradient_bytes(const Unit& unit) {
  int64_t bytes = 0;
  for (const auto& param : unit.params()) {
    if (param->trainable()) {
      const auto widest =
          std::max(c10::elementSize(unit.reduce_dtype_of(*param)), c10::elementSize(param->gathered_dtype()));
      bytes += param->layout().numel() * static_cast<int64_t>(widest);
    }
  }
  return bytes;
}

// What this rank pays when the unit is whole.
int64_t whole_bytes(const Unit& unit) {
  int64_t bytes = 0;
  for (const auto& param : unit.params()) {
    Group& group = *param->bucket().gather_group;
    const bool own_memory = !group.gathers_in_place() || !param->layout().in_place();
    const bool cast = param->shard_dtype() != param->gathered_dtype();
    bytes += own_memory ? param->gathered_bytes() : (cast ? param->gathered_bytes() / group.size() : 0);
  }
  return bytes;
}

int64_t sum_of_largest(std::vector<int64_t> values, size_t count) {
  std::sort(values.rbegin(), values.rend());
  int64_t sum = 0;
  for (size_t i = 0; i < std::min(count, values.size()); ++i) {
    sum += values[i];
  }
  return sum;
}

} // namespace

int64_t passing_bytes(const std::vector<Unit*>& units) {
  std::vector<int64_t> passing, gradients;
  int64_t staying = 0;
  size_t in_flight = 0;
  for (const Unit* unit : units) {
    (unit->reshards_after(Phase::kForward) ? passing.emplace_back() : staying) += whole_bytes(*unit);
    gradients.push_back(gradient_bytes(*unit));
    in_flight = static_cast<size_t>(unit->runtime().reducer().max_in_flight());
  }
  return staying + sum_of_largest(passing, 3) + sum_of_largest(gradients, in_flight + 1);
}

} // namespace fsdp::engine::prediction
