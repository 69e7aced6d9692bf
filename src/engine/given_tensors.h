#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "engine/operators.h"
#include "engine/recorded_storage.h"

namespace fsdp::engine {

/// A tensor among the arguments of an operator that is called during a recording.
struct GivenTensor {
  at::Tensor tensor;
  RecordedStorage* recorded; ///< null for others
  bool written;
  bool overwritten; ///< all of it, and nothing of it is read
  bool covers_storage;

  bool whole_storage_is_overwritten() const {
    return overwritten && covers_storage;
  }
};

/// All of them, in order; and the call's arguments with others in their place. For the time of the call.
class GivenTensors {
 public:
  GivenTensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  const c10::OperatorHandle& op() const {
    return op_;
  }
  const std::vector<GivenTensor>& all() const {
    return all_;
  }
  template <class Is>
  bool any(const Is& is) const {
    return std::any_of(all_.begin(), all_.end(), is);
  }
  bool any_recorded() const {
    return any([](const GivenTensor& given) { return given.recorded != nullptr; });
  }
  bool any_written() const {
    return any([](const GivenTensor& given) { return given.written; });
  }

  /// Null if the operator has no such argument.
  const c10::IValue* argument(const char* name) const;
  torch::jit::Stack arguments_with(const std::vector<at::Tensor>& tensors) const;
  /// Those that are recorded are replaced by tensors with memory: of the right values where these are read.
  std::vector<at::Tensor> with_values() const;
  /// The device of what the operator returns; unset if only running it can tell.
  std::optional<c10::Device> device_of_results() const;

 private:
  bool needs_values(const GivenTensor& given) const;

  const c10::OperatorHandle& op_;
  const OperatorTraits& traits_;
  c10::ArrayRef<c10::IValue> arguments_;
  std::vector<GivenTensor> all_;
};

/// A recording has ended: memory in which random numbers were drawn and thrown away goes.
void forget_scratch();

} // namespace fsdp::engine
