#include "engine/tenant.h"

#include <utility>

#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/variable.h>

#include "engine/param.h"

namespace fsdp::engine {

namespace {

void end_tenancy(void* context) {
  delete static_cast<Tenant*>(context);
}

Tenant* tenant_in(c10::StorageImpl& storage) {
  auto& data = storage._mutable_data_ptr_no_checks();
  return data.get_deleter() == &end_tenancy ? static_cast<Tenant*>(data.get_context()) : nullptr;
}

// Swaps the memory and keeps the tenant: dropping the old DataPtr would end its tenancy.
void set_memory(c10::StorageImpl& storage, void* memory) {
  auto& current = storage._mutable_data_ptr_no_checks();
  const c10::Device device = current.device();
  void* tenant = current.release_context();
  storage.set_data_ptr_noswap(c10::DataPtr(memory, tenant, &end_tenancy, device));
}

} // namespace

Tenant* tenant_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kKey) || !tensor.has_storage()) {
    return nullptr;
  }
  return tenant_in(*tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

Param* param_of(const at::Tensor& tensor) {
  const Tenant* tenant = tenant_of(tensor);
  const bool of_one = tenant != nullptr && (tenant->role == Role::kHandle || tenant->role == Role::kShard);
  return of_one ? tenant->param : nullptr;
}

Param* param_of_shard(const at::Tensor& tensor) {
  Param* param = param_of(tensor);
  return param != nullptr && param->shard().is_same(tensor) ? param : nullptr;
}

Param* param_behind_shard(const at::Tensor& tensor) {
  const Tenant* tenant = tenant_of(tensor);
  const bool is_shard = tenant != nullptr && (tenant->role == Role::kShard || tenant->role == Role::kFlatShard);
  return is_shard ? tenant->param : nullptr;
}

bool is_handle(const at::Tensor& tensor) {
  const Tenant* tenant = tenant_of(tensor);
  return tenant != nullptr && tenant->role == Role::kHandle;
}

bool is_left_shard(const at::Tensor& tensor) {
  const Tenant* tenant = tenant_of(tensor);
  return tenant != nullptr && tenant->param == nullptr &&
         (tenant->role == Role::kShard || tenant->role == Role::kFlatShard);
}

void leave(WeakStorage& storage) {
  if (const auto alive = storage.lock()) {
    if (Tenant* tenant = tenant_in(*alive)) { // none if users have given the storage other memory
      tenant->param = nullptr;
    }
  }
  storage.reset();
}

void take_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (tensor.device().type() == data.device().type()) {
    tensor.set_data(data);
    return;
  }
  if (auto* autograd = torch::autograd::impl::get_autograd_meta(tensor)) {
    autograd->grad_accumulator_.reset(); // which is for the former device
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

at::Tensor make_keyed_tensor(Tenant tenant, void* memory, const TensorGeometry& geometry) {
  const auto dtype = c10::scalarTypeToTypeMeta(geometry.dtype);
  int64_t last = 0; // the farthest element
  bool empty = false;
  for (size_t d = 0; d < geometry.sizes.size(); ++d) {
    last += (geometry.sizes[d] - 1) * geometry.strides[d];
    empty = empty || geometry.sizes[d] == 0;
  }
  const size_t bytes = empty ? 0 : static_cast<size_t>(last + 1) * dtype.itemsize();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      bytes,
      c10::DataPtr(memory, new Tenant(std::move(tenant)), &end_tenancy, geometry.device),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  const auto dispatch_key = c10::computeDispatchKey(geometry.dtype, c10::kStrided, geometry.device);
  auto keys = c10::DispatchKeySet(dispatch_key).add(kKey);
  if (!geometry.device.is_meta()) {
    keys = keys.add(kInnerKey);
  }
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)), keys, dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes, geometry.strides);
  return tensor;
}

WeakStorage key_in_place(const at::Tensor& tensor, Role role, Param* param, const TensorGeometry& geometry) {
  void* memory = tensor.numel() == 0 ? nullptr : tensor.data_ptr();
  const at::Tensor keyed =
      make_keyed_tensor({role, param, std::make_shared<c10::Storage>(tensor.storage())}, memory, geometry);
  tensor.set_data(keyed);
  return keyed.storage().getWeakStorageImpl();
}

bool is_strangers(const at::Tensor& tensor) {
  const bool plain = tensor.layout() == c10::kStrided && !tensor.key_set().has(c10::DispatchKey::Python);
  return plain && !tensor.is_meta() && tenant_of(tensor) == nullptr;
}

void fill_storage(c10::StorageImpl& storage, void* memory, [[maybe_unused]] std::string& why_hollow) {
  set_memory(storage, memory);
#ifdef FSDP_HAS_DATA_PTR_GUARD
  if (auto& text = storage.get_extra_meta().custom_data_ptr_error_msg_) {
    why_hollow = std::move(*text);
  }
  storage.clear_data_ptr_access_error_msg_();
#endif
}

void hollow_storage(c10::StorageImpl& storage, [[maybe_unused]] std::string& why_hollow) {
  set_memory(storage, nullptr);
#ifdef FSDP_HAS_DATA_PTR_GUARD
  if (storage.nbytes() > 0 && !why_hollow.empty()) { // else it has it already
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::exchange(why_hollow, {}));
  }
#endif
}

void own_memory(c10::StorageImpl& storage, c10::StorageImpl& other) {
  auto memory = other.set_data_ptr(c10::DataPtr(nullptr, other.device()));
#ifdef FSDP_HAS_DATA_PTR_GUARD
  storage.clear_data_ptr_access_error_msg_();
#endif
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_allocator(other.allocator());
  storage.set_resizable(other.resizable());
}

} // namespace fsdp::engine
