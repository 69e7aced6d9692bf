#include "engine/recorded_storage.h"

#include <cstring>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include "base/check.h"
#include "engine/internal_scope.h"
#include "engine/replay.h"

namespace fsdp::engine {

namespace {

constexpr const char* kWhyHollow =
    "[deferred_init] raw access to a tensor that is recorded and has no memory yet: what is made in deferred_init is "
    "there for operators only. Call fully_shard or FullyShardedDataParallel on its module, or fsdp::materialize";

c10::StorageImpl& storage_impl_of(const at::Tensor& tensor) {
  return *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

bool is_equal(const at::Tensor& bytes, const at::Tensor& others) {
  return std::memcmp(bytes.const_data_ptr(), others.const_data_ptr(), bytes.numel()) == 0;
}

// A clone of what was written.
std::shared_ptr<const Operation> made_of(at::Tensor bytes, std::shared_ptr<const Memory> memory) {
  static const auto clone = c10::Dispatcher::singleton().findSchemaOrThrow("aten::clone", "");
  auto operation = std::make_shared<Operation>(clone);
  const auto size = static_cast<int64_t>(memory->bytes);
  operation->results = {RecordedTensor{std::move(memory), nullptr, {size}, {1}, 0, c10::kByte}};
  operation->constants = {{bytes, bytes.unsafeGetTensorImpl()->version_counter().current_version()}};
  operation->arguments = {std::move(bytes), c10::IValue()};
  operation->tensors = {std::nullopt};
  return operation;
}

Replay replay_of(const at::Tensor& tensor) {
  end_writes_by_address(tensor, /*overwritten=*/false);
  Replay replay;
  replay.add(described(tensor, /*with_values=*/true));
  return replay;
}

} // namespace

RecordedStorage* recorded_storage_of(const at::Tensor& tensor) {
  const Tenant* tenant = tenant_of(tensor);
  return tenant != nullptr && tenant->role == Role::kRecorded ? static_cast<RecordedStorage*>(tenant->keeps.get())
                                                              : nullptr;
}

at::Tensor make_recorded_tensor(const TensorGeometry& geometry) {
  auto recorded = std::make_shared<RecordedStorage>();
  recorded->why_hollow = kWhyHollow;
  auto tensor = make_keyed_tensor({Role::kRecorded, nullptr, recorded}, nullptr, geometry);
  recorded->memory = std::make_shared<Memory>(Memory{tensor.storage().nbytes(), geometry.device});
  hollow_storage(storage_impl_of(tensor), recorded->why_hollow);
  return tensor;
}

void let_write_by_address(const at::Tensor& tensor) {
  auto& recorded = *recorded_storage_of(tensor);
  if (recorded.memory->bytes > 0) {
    const InternalScope scope;
    recorded.by_address = at::empty({static_cast<int64_t>(recorded.memory->bytes)}, c10::kByte);
    fill_storage(storage_impl_of(tensor), recorded.by_address.mutable_data_ptr(), recorded.why_hollow);
  }
}

// Addresses that were taken before are followed as far as a look at all that is there costs little.
void end_writes_by_address(const at::Tensor& tensor, bool overwritten) {
  constexpr int64_t kFollowed = int64_t{1} << 20;
  auto& recorded = *recorded_storage_of(tensor);
  const at::Tensor& bytes = recorded.by_address;
  const bool first = !recorded.seen.defined(), follows = bytes.defined() && bytes.numel() <= kFollowed;
  if (!bytes.defined() || (!first && (!follows || is_equal(bytes, recorded.seen)))) {
    return;
  }
  const bool by_address_alone = first || recorded.values == recorded.of_seen;
  FSDP_CHECK(
      by_address_alone || overwritten,
      "[deferred_init] operators have written to a tensor, and so has somebody who took its address (data_ptr, "
      "accessor) before: write it by its address before any operator does, or by operators alone");
  if (first) {
    hollow_storage(storage_impl_of(tensor), recorded.why_hollow);
  }
  const InternalScope scope;
  recorded.seen = follows ? bytes.clone() : bytes;
  if (by_address_alone) { // also if overwritten: what is to do it may fail
    recorded.values = recorded.of_seen = made_of(recorded.seen, recorded.memory);
  }
}

RecordedTensor described(const at::Tensor& tensor, bool with_values) {
  const auto& recorded = *recorded_storage_of(tensor);
  return {
      recorded.memory,
      with_values ? recorded.values : nullptr,
      tensor.sizes().vec(),
      tensor.strides().vec(),
      tensor.storage_offset(),
      tensor.scalar_type(),
      tensor.is_conj(),
      tensor.is_neg(),
      tensor.unsafeGetTensorImpl()->is_wrapped_number()};
}

void make_values(const at::Tensor& tensor) {
  if (recorded_storage_of(tensor) == nullptr) {
    return;
  }
  Replay replay = replay_of(tensor);
  replay.run();
  const auto made = replay.tensor(described(tensor, /*with_values=*/true)).storage();
  own_memory(storage_impl_of(tensor), *made.unsafeGetStorageImpl());
}

void materialize(const at::Tensor& tensor) {
  make_values(tensor);
  const bool has_key = tensor.defined() && tensor.has_storage() && tensor.key_set().has(kKey);
  if (has_key && tenant_of(tensor) == nullptr && !tensor.is_conj() && !tensor.is_neg()) {
    const InternalScope scope;
    auto plain = at::empty({0}, tensor.options().requires_grad(false));
    plain.set_(tensor.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
    take_data(tensor, plain);
  }
}

void check_can_materialize(const at::Tensor& tensor) {
  if (recorded_storage_of(tensor) != nullptr) {
    replay_of(tensor).check();
  }
}

std::string fingerprint(const at::Tensor& tensor) {
  return replay_of(tensor).fingerprint();
}

} // namespace fsdp::engine
