#pragma once

#include <cstdint>

#include <ATen/core/dispatch/Dispatcher.h>

namespace fsdp::engine {

/// What an operator does with its tensors, read once from its schema.
struct OperatorTraits {
  /// Makes views or asks for metadata: reads no element. [Note: why a view is no touch] A view has no value yet, only a
  /// place; and a rank that prints a shape must not start a collective.
  bool reads_nothing = false;
  /// Bit i: argument i is written (operators have fewer than 64 arguments; what lies beyond is taken as not written).
  uint64_t writes = 0;
  /// What it writes may come after it has returned.
  bool writes_later = false;
  /// Refuses inputs of different floating-point dtypes.
  bool dtypes_must_agree = false;
  /// Which argument is a list of weights that may hold shards where handles are needed; -1: none.
  int weights = -1;

  bool writes_argument(size_t index) const {
    return index < 64 && (writes >> index & 1) != 0;
  }
};

/// Thread safe, and cheap after an operator's first call on a thread.
const OperatorTraits& traits_of(const c10::OperatorHandle& op);

} // namespace fsdp::engine
