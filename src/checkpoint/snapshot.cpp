#include "checkpoint/snapshot.h"

#include <ATen/ops/_lazy_clone.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/COW.h>

namespace fsdp::disk {

at::Tensor snapshot_of(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || !tensor.has_storage() || tensor.numel() == 0) {
    return {};
  }
  const c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const bool shares_already = c10::impl::cow::is_cow_data_ptr(storage.data_ptr());
  if (!shares_already && !c10::impl::cow::has_simple_data_ptr(storage)) {
    return {};
  }
  return at::_lazy_clone(tensor.detach());
}

} // namespace fsdp::disk
