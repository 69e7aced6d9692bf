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

bool reads_in_place(const Param& param) {
  return param.bucket().gather_group->gathers_in_place();
}

// What this rank pays when the unit is whole.
int64_t whole_bytes(const Unit& unit) {
  int64_t bytes = 0;
  for (const auto& param : unit.params()) {
    const bool own_memory = !reads_in_place(*param) || !param->bucket().lies_well(*param);
    const bool cast = param->shard_dtype() != param->gathered_dtype();
    const int ranks = param->bucket().gather_group->size();
    bytes += own_memory ? param->gathered_bytes() : (cast ? param->gathered_bytes() / ranks : 0);
  }
  return bytes;
}

// What travels is in memory twice until it is sorted into the parameters.
int64_t arriving_bytes(const Unit& unit) {
  int64_t bytes = 0;
  for (const auto& param : unit.params()) {
    bytes += reads_in_place(*param) ? 0 : param->gathered_bytes();
  }
  return bytes;
}

// What it keeps between forward and backward for a gather among neighbours.
int64_t share_bytes(const Unit& unit) {
  return unit.policy.reshard_to ? arriving_bytes(unit) / *unit.policy.reshard_to : 0;
}

// The units around a unit stay whole while it is used.
int64_t bytes_around(const Unit& unit) {
  int64_t bytes = 0;
  for (const Unit* around = unit.parent(); around != nullptr; around = around->parent()) {
    bytes += around->reshards_after(Phase::kForward) ? whole_bytes(*around) : 0;
  }
  return bytes;
}

size_t most_prefetched(const Unit& unit) {
  const auto& policy = unit.policy;
  return std::max({unit.runtime().prefetched(), policy.forward_prefetch.size(), policy.backward_prefetch.size()});
}

// Those that arrive, and those in flight.
size_t gradients_at_once(const Unit& unit) {
  return 1 + static_cast<size_t>(unit.runtime().reducer().max_in_flight());
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
  std::vector<int64_t> passing, arriving, gradients;
  int64_t staying = 0, around = 0;
  size_t ahead = 0, at_once = 0;
  for (const Unit* unit : units) {
    (unit->reshards_after(Phase::kForward) ? passing.emplace_back() : staying) += whole_bytes(*unit);
    staying += share_bytes(*unit);
    arriving.push_back(arriving_bytes(*unit));
    gradients.push_back(gradient_bytes(*unit));
    around = std::max(around, bytes_around(*unit));
    ahead = std::max(ahead, most_prefetched(*unit));
    at_once = std::max(at_once, gradients_at_once(*unit));
  }
  return staying + around + sum_of_largest(passing, 2 + std::max<size_t>(ahead, 1)) +
         sum_of_largest(arriving, 1 + ahead) + sum_of_largest(gradients, at_once);
}

} // namespace fsdp::engine::prediction
