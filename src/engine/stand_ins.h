#pragma once

#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace fsdp::engine {

/// Tensors on the meta device that stand for others in a trial of an operator: alike, but for their values.
class StandIns {
 public:
  /// Views of one storage have stand-ins that are.
  at::Tensor of(const at::Tensor& tensor, bool differentiable);

 private:
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

} // namespace fsdp::engine
