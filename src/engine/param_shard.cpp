// A parameter's shard: the memory it lies in, and the data that users put in its place.

#include <utility>

#include <ATen/ops/empty_strided.h>

#include "base/check.h"
#include "engine/bucket.h"
#include "engine/internal_scope.h"
#include "engine/param.h"
#include "engine/unit.h"

namespace fsdp::engine {

bool Param::shard_was_replaced() const {
  return shown_->replaced() || replaced_ || (!shard_is_in_its_storage() && !on_meta());
}

void Param::shard_was_given_data() {
  keep_for_holders();
  know_shard_again();
}

void Param::keep_for_holders() {
  for (const auto& holder : forgetful_) {
    holder.keep(handle());
  }
}

void Param::know_shard_again() {
  const bool plain = shard_.layout() == c10::kStrided && !shard_.key_set().has(c10::DispatchKey::Python);
  if (!plain || on_meta() || tenant_of(shard_) != nullptr) {
    return;
  }
  InternalScope scope;
  const auto sizes = shard_.sizes().vec(), strides = shard_.strides().vec();
  key_shard({sizes, strides, shard_.scalar_type(), shard_.device()});
  replaced_ = true;
}

bool Param::takes_values_of_handle() const {
  return shown_itself_ && !bucket_.options().extended && !on_meta() && (unit_.held == 0 || bucket_.is_private());
}

void Param::take_values(const at::Tensor& whole) {
  InternalScope scope;
  const at::Tensor piece = piece_of(whole.detach());
  if (unit_.held > 0) { // a guard shows it, and writes back what it shows
    unit_.private_copy(*this).copy_(whole);
  } else {
    shard_.set_data(piece);
    know_shard_again();
  }
  values_change();
}

void Param::remind_holders() const {
  for (const auto& holder : forgetful_) {
    holder.remind();
  }
}

// Where it lies: from now on it is ours.
void Param::key_shard(const TensorGeometry& geometry) {
  auto owned = std::make_unique<Tenant>(Tenant{Role::kShard, this, std::make_shared<c10::Storage>(shard_.storage())});
  Tenant* tenant = owned.get();
  void* memory = shard_.numel() == 0 ? nullptr : shard_.data_ptr();
  leave_shard_storage();
  shard_.set_data(make_keyed_tensor(std::move(owned), memory, geometry));
  note_shard_storage(tenant);
}

void Param::note_shard_storage(Tenant* tenant) {
  shard_storage_ = shard_.storage().unsafeGetStorageImpl();
  shard_tenant_ = tenant;
}

// Views of the former shard may live on, as nobody's.
void Param::leave_shard_storage() {
  shard_storage_ = nullptr;
  if (Tenant* tenant = std::exchange(shard_tenant_, nullptr)) {
    tenant->param = nullptr;
  }
}

void Param::adopt_replacement() {
  if (!shown_->replaced()) {
    return;
  }
  at::Tensor replacement = shown_->replacement();
  const bool same_values = !on_meta() && tenant_of(replacement) == shard_tenant_ &&
                           replacement.const_data_ptr() == shard_.const_data_ptr() &&
                           replacement.sizes() == shard_.sizes() && replacement.strides() == shard_.strides() &&
                           replacement.scalar_type() == shard_.scalar_type();
  if (shard_tenant_ != nullptr && same_values) { // another tensor around them, which `to()` makes of a DTensor's
    shard_ = std::move(replacement);
    return;
  }
  leave_shard_storage();
  end_watching();
  shard_ = std::move(replacement);
}

void Param::give_memory(c10::Device device) {
  InternalScope scope;
  take_data(shard_, at::empty_strided(shard_sizes_, shard_strides_, shard_.options().device(device)));
}

void Param::values_change() {
  if (const at::Tensor handle(handle_.lock()); handle.defined()) {
    handle.unsafeGetTensorImpl()->bump_version();
  }
}

void Param::end_watching() {
  for (Tenant* tenant : std::exchange(watched_, {})) {
    tenant->param = nullptr;
  }
}

void Param::show_as(std::shared_ptr<ShownShard> shown) {
  if (shard_.requires_grad()) {
    shard_.set_requires_grad(false); // from now on it is a part of what is shown
  }
  shown_ = std::move(shown);
  shown_itself_ = false;
}

void Param::move_shard(void* memory, std::shared_ptr<void> home, c10::Device device) {
  InternalScope scope;
  FSDP_CHECK(
      shard_.sizes() == c10::IntArrayRef(shard_sizes_),
      "[fully_shard] the shard of '{}' was replaced by data of sizes {} where {} are needed: give it this rank's piece "
      "only; whole values, a file's say, in a summon_full_params guard",
      name_,
      shard_.sizes(),
      c10::IntArrayRef(shard_sizes_));
  auto owned = std::make_unique<Tenant>(Tenant{Role::kShard, this, std::move(home)});
  Tenant* tenant = owned.get();
  auto moved =
      make_keyed_tensor(std::move(owned), memory, {shard_sizes_, shard_strides_, shard_.scalar_type(), device});
  moved.copy_(shard_);
  leave_shard_storage();
  shard_.set_data(moved);
  note_shard_storage(tenant);
  replaced_ = false;
}

void Param::leave_whole() {
  if (!on_meta()) {
    shard_.set_data(shard_.clone());
  }
}

void Param::settle_shard_in_place() {
  if (!std::exchange(replaced_, false) && shard_is_in_its_storage()) {
    return;
  }
  InternalScope scope;
  key_shard({shard_sizes_, shard_strides_, shard_.scalar_type(), shard_.device()});
}

void Param::watch(at::Tensor stored) {
  if (const Tenant* present = tenant_of(stored); present != nullptr && present->param == this) {
    return;
  }
  InternalScope scope;
  void* memory = stored.numel() == 0 ? nullptr : stored.data_ptr();
  auto tenant = std::make_unique<Tenant>(Tenant{Role::kShard, this, std::make_shared<c10::Storage>(stored.storage())});
  watched_.push_back(tenant.get());
  const auto sizes = stored.sizes().vec(), strides = stored.strides().vec();
  stored.set_data(
      make_keyed_tensor(std::move(tenant), memory, {sizes, strides, stored.scalar_type(), stored.device()}));
}

} // namespace fsdp::engine
