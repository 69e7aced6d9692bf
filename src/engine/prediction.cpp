#include "engine/prediction.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/stream.h"
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
  const Bucket& bucket = param.bucket();
  const Unit& unit = param.unit();
  const bool comes_from_host = unit.offloaded() && has_streams(unit.device());
  return bucket.gather_group->gathers_in_place() && !bucket.is_extended() && !comes_from_host;
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

int64_t sum_of_largest(std::vector<int64_t> values, size_t count) {
  std::sort(values.rbegin(), values.rend());
  int64_t sum = 0;
  for (size_t i = 0; i < std::min(count, values.size()); ++i) {
    sum += values[i];
  }
  return sum;
}

// A unit's, which arrive; those of the units around it, of which some may have arrived before; and others in flight.
int64_t most_gradients(const std::vector<Unit*>& units) {
  std::vector<std::pair<int64_t, const Unit*>> largest;
  int64_t in_flight = 0, most = 0;
  for (const Unit* unit : units) {
    largest.emplace_back(gradient_bytes(*unit), unit);
    in_flight = std::max(in_flight, unit->runtime().reducer().max_in_flight());
  }
  std::sort(largest.rbegin(), largest.rend());
  for (const Unit* unit : units) {
    std::vector<const Unit*> arriving;
    int64_t bytes = 0;
    for (const Unit* each = unit; each != nullptr; each = each->parent()) {
      arriving.push_back(each);
      bytes += gradient_bytes(*each);
    }
    auto other = largest.begin();
    for (int64_t left = in_flight; left > 0 && other != largest.end(); ++other) {
      if (std::find(arriving.begin(), arriving.end(), other->second) == arriving.end()) {
        bytes += other->first;
        --left;
      }
    }
    most = std::max(most, bytes);
  }
  return most;
}

} // namespace

int64_t passing_bytes(const std::vector<Unit*>& units) {
  std::vector<int64_t> passing, arriving;
  int64_t staying = 0, around = 0;
  size_t ahead = 0;
  for (const Unit* unit : units) {
    (unit->reshards_after(Phase::kForward) ? passing.emplace_back() : staying) += whole_bytes(*unit);
    staying += share_bytes(*unit);
    arriving.push_back(arriving_bytes(*unit));
    around = std::max(around, bytes_around(*unit));
    ahead = std::max(ahead, most_prefetched(*unit));
  }
  return staying + around + sum_of_largest(passing, 2 + std::max<size_t>(ahead, 1)) +
         sum_of_largest(arriving, 1 + ahead) + most_gradients(units);
}

} // namespace fsdp::engine::prediction
