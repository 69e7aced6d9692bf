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
  return (shown_ && shown_->replaced()) || replaced_ || (!lies_in(shard_, shard_storage_) && !on_meta());
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
  if (is_strangers(shard_)) {
    InternalScope scope;
    key_shard(geometry_of(shard_));
    replaced_ = true;
  }
}

bool Param::takes_values_of_handle() const {
  return !shown_ && !bucket_.is_extended() && !on_meta() && (unit_.held == 0 || bucket_.is_private());
}

void Param::take_values(const at::Tensor& whole) {
  InternalScope scope;
  const at::Tensor piece = piece_of(whole.detach());
  if (unit_.held > 0) { // a guard shows it, and writes back what it shows
    bucket_.private_copy(*this).copy_(whole);
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
  leave(shard_storage_);
  shard_storage_ = key_in_place(shard_, Role::kShard, this, geometry);
}

void Param::adopt_replacement() {
  if (!shown_ || !shown_->replaced()) {
    return;
  }
  at::Tensor replacement = shown_->replacement();
  const bool same_values = !on_meta() && lies_in(replacement, shard_storage_) &&
                           replacement.const_data_ptr() == shard_.const_data_ptr() &&
                           replacement.sizes() == shard_.sizes() && replacement.strides() == shard_.strides() &&
                           replacement.scalar_type() == shard_.scalar_type();
  if (same_values) { // another tensor around them, which `to()` makes of a DTensor's
    shard_ = std::move(replacement);
    return;
  }
  leave(shard_storage_);
  end_watching();
  shard_ = std::move(replacement);
}

void Param::give_memory(c10::Device device) {
  InternalScope scope;
  take_data(shard_, at::empty_strided(shard_sizes_, shard_strides_, shard_.options().device(device)));
}

void Param::values_change() {
  if (const at::Tensor handle = present_handle(); handle.defined()) {
    handle.unsafeGetTensorImpl()->bump_version();
  }
}

void Param::end_watching() {
  for (WeakStorage& storage : watched_) {
    leave(storage);
  }
  watched_.clear();
}

void Param::show_as(std::shared_ptr<ShownShard> shown) {
  if (shard_.requires_grad()) {
    shard_.set_requires_grad(false); // from now on it is a part of what is shown
  }
  shown_ = std::move(shown);
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
  const TensorGeometry geometry{shard_sizes_, shard_strides_, shard_.scalar_type(), device};
  auto moved = make_keyed_tensor({Role::kShard, this, std::move(home)}, memory, geometry);
  moved.copy_(shard_);
  leave(shard_storage_);
  shard_.set_data(moved);
  shard_storage_ = moved.storage().getWeakStorageImpl();
  replaced_ = false;
}

void Param::leave_whole() {
  if (!on_meta()) {
    shard_.set_data(shard_.clone());
  }
}

void Param::settle_shard_in_place() {
  if (!std::exchange(replaced_, false) && lies_in(shard_, shard_storage_)) {
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
  std::erase_if(watched_, [](const WeakStorage& storage) { return storage.expired(); });
  watched_.push_back(key_in_place(stored, Role::kShard, this, geometry_of(stored)));
}

} // namespace fsdp::engine
