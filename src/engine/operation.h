#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

namespace fsdp::engine {

struct Operation;

/// What a recorded storage will be once it has memory. Storages are told apart by its address.
struct Memory {
  size_t bytes;
  c10::Device device;
};

/// A tensor that is a view of memory that does not exist yet.
struct RecordedTensor {
  std::shared_ptr<const Memory> memory;
  std::shared_ptr<const Operation> values; ///< the last to have written the memory; null if it does not matter
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  c10::ScalarType dtype;
  bool is_conj = false, is_neg = false, is_wrapped_number = false;
};

/// A tensor that was there before the recording, or that it has no part in: as it was.
struct Constant {
  at::Tensor tensor;
  uint64_t version;
};

/// An operator's call that is run later, perhaps several times, perhaps never. It keeps those alive that made what it
/// reads; each refers to earlier ones only. Immutable.
struct Operation {
  explicit Operation(const c10::OperatorHandle& op);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  c10::OperatorHandle op;
  int64_t number; ///< later ones have larger numbers
  std::vector<c10::IValue> arguments; ///< plain tensors among them are constants too; recorded ones are replaced
  std::vector<std::optional<RecordedTensor>> tensors; ///< of the tensors among the arguments, in order
  std::vector<Constant> constants;
  std::vector<std::optional<RecordedTensor>> results; ///< of the tensors that it returns: which have new memory
  at::Generator generator; ///< as it was before; undefined if no random numbers are drawn
  std::optional<c10::ScalarType> default_dtype; ///< of the time, where it is in that that the result was computed
};

/// The argument of this name; -1 if there is none.
int index_of_argument(const c10::FunctionSchema& schema, const char* name);

} // namespace fsdp::engine
