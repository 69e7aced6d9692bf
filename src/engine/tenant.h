#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>

namespace fsdp::engine {

class Param;

/// The dispatch key that marks handles and shards, so that operators on them are seen first. It stands above autograd
/// and no operator of torch has a kernel for it.
inline constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;
/// Inside of a tensor subclass's own dispatch (a DTensor's, say), torch excludes all keys above Python's. This one lies
/// below it, so that operators on what the subclass wraps are seen there: reads of handles that have to be whole, and
/// writes to shards, which on the CPU other ranks may read in place.
inline constexpr c10::DispatchKey kInnerKey = c10::DispatchKey::CustomRNGKeyId;
inline constexpr c10::DispatchKeySet kKeys{kKey, kInnerKey};

enum class Role : uint8_t {
  kHandle, ///< full shape; memory only while its unit is whole
  kShard, ///< this rank's piece, in the group's memory
  kFlatShard, ///< this rank's pieces of all parameters of a flat bucket; `param` is the first
  kGradient, ///< never any memory: stands in for a handle's gradient, which lives on the shard
  kRecorded ///< none yet: how it is made is recorded; no `param`
};

/// Who lives in a storage: the context of its DataPtr, owned by the storage. `param` is null once the parameter is
/// gone.
struct Tenant {
  Role role;
  Param* param;
  std::shared_ptr<void> keeps; ///< the unit for a handle, the home for a shard, the record: freed with the storage
};

/// It lives on with views of what lay there; as nobody's, once it has been left. May die on any thread.
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// While it lives nothing else comes to lie at the tensor's address.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

/// Null for a tensor that is not ours. One pointer comparison: cheap enough for every operator.
Tenant* tenant_of(const at::Tensor& tensor);

/// The parameter behind a shard or a handle; null for any other tensor.
Param* param_of(const at::Tensor& tensor);
/// The parameter whose shard this is; null for any other tensor, for views of a shard too.
Param* param_of_shard(const at::Tensor& tensor);
/// The parameter behind a shard or a view of one, of a flat shard the first; null for any other tensor.
Param* param_behind_shard(const at::Tensor& tensor);
bool is_handle(const at::Tensor& tensor);
/// Whether it was a shard, of a parameter that is gone or lies elsewhere now.
bool is_left_shard(const at::Tensor& tensor);
/// Whether the tensor is in this storage, and that is ours still.
inline bool lies_in(const at::Tensor& tensor, const WeakStorage& storage) {
  return tenant_of(tensor) != nullptr &&
         tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage._unsafe_get_target();
}
/// The storage is no parameter's any more.
void leave(WeakStorage& storage);

struct TensorGeometry {
  c10::IntArrayRef sizes;
  c10::IntArrayRef strides;
  c10::ScalarType dtype;
  c10::Device device;
};

inline TensorGeometry geometry_of(const at::Tensor& tensor) {
  return {tensor.sizes(), tensor.strides(), tensor.scalar_type(), tensor.device()};
}

/// As `set_data`, which refuses data of another kind of device (of the meta device, say).
void take_data(const at::Tensor& tensor, const at::Tensor& data);

/// A keyed tensor over `memory` (null: hollow), which it does not own. The storage owns `tenant`.
at::Tensor make_keyed_tensor(Tenant tenant, void* memory, const TensorGeometry& geometry);
/// The tensor becomes one where it lies, and keeps what it was in.
WeakStorage key_in_place(const at::Tensor& tensor, Role role, Param* param, const TensorGeometry& geometry);
/// Whether users have put other data into a tensor of ours, such as can become ours where they lie.
bool is_strangers(const at::Tensor& tensor);

/// Puts memory under a storage and all its views, or takes it away; then raw `data_ptr` access throws `why_hollow`,
/// unless no memory is needed. That text goes back and forth: to copy it at every step would take longer than all else
/// here.
void fill_storage(c10::StorageImpl& storage, void* memory, std::string& why_hollow);
void hollow_storage(c10::StorageImpl& storage, std::string& why_hollow);
/// The tenancy ends: the storage takes another's memory for its own, as LibTorch's storages have.
void own_memory(c10::StorageImpl& storage, c10::StorageImpl& other);

} // namespace fsdp::engine
