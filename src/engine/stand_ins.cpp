#include "engine/stand_ins.h"

#include <ATen/ops/empty.h>

#include "engine/internal_scope.h"

namespace fsdp::engine {

at::Tensor StandIns::of(const at::Tensor& tensor, bool differentiable) {
  at::Tensor stand_in;
  {
    const InternalScope scope;
    const auto options = at::TensorOptions().device(c10::kMeta);
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(storage);
    if (found == storages_.end()) {
      const auto bytes = at::empty({static_cast<int64_t>(storage->nbytes())}, options.dtype(c10::kByte));
      found = storages_.emplace(storage, bytes.storage()).first;
    }
    stand_in = at::empty({0}, options.dtype(tensor.scalar_type()));
    stand_in.set_(found->second, tensor.storage_offset(), tensor.sizes(), tensor.strides());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      stand_in.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
  }
  if (differentiable && tensor.requires_grad()) {
    stand_in.set_requires_grad(true);
  }
  return stand_in;
}

} // namespace fsdp::engine
