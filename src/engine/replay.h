#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "engine/operation.h"

namespace fsdp::engine {

/// Runs recorded operations to make what they make. What lies between goes as soon as it is no longer needed.
class Replay {
 public:
  /// Another tensor that is wanted.
  void add(const RecordedTensor& wanted);
  /// An Error if one of the operations cannot be run any more.
  void check() const;
  void run();
  /// After `run`: one of the tensors that were wanted. They share memory as the recorded ones do.
  at::Tensor tensor(const RecordedTensor& wanted);
  /// A text that differs where the values would.
  std::string fingerprint() const;

 private:
  std::vector<const Operation*> in_order() const;
  void run(const Operation& operation);
  void keep_results(
      const Operation& operation, c10::ArrayRef<c10::IValue> returned, const std::vector<at::Tensor>& given);

  std::unordered_map<const Operation*, std::shared_ptr<const Operation>> needed_;
  std::unordered_map<const Memory*, std::shared_ptr<const Memory>> wanted_;
  std::unordered_map<const Memory*, c10::Storage> storages_;
};

} // namespace fsdp::engine
