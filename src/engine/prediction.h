#pragma once

#include <cstdint>
#include <vector>

namespace fsdp::engine {

class Unit;

/// What the design promises about memory, before any step has run. Bytes on this rank.
namespace prediction {

/// The most that whole units and whole gradients together take at any time of a step: the units that stay whole; the
/// one in use, those around it, the one before it and those prefetched; what arrives; gradients arriving, in flight,
/// and still read by slower ranks.
int64_t passing_bytes(const std::vector<Unit*>& units);

} // namespace prediction
} // namespace fsdp::engine
