#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

#include <fsdp/shown_shard.h>

#include "engine/tenant.h"
#include "engine/waiting_gradient.h"
#include "layout/param_layout.h"

namespace fsdp::engine {

class BackwardGraph;
class Bucket;
class Unit;

/// One sharded parameter: its handle, its shard, and the gradient on its way from one to the other.
/// Owned by its unit; not thread safe by itself: the runtime's lock covers it.
class alignas(64) Param {
 public:
  Param(Unit& unit, Bucket& bucket, std::string name, const at::Tensor& original, layout::ParamLayout layout);
  ~Param();
  Param(const Param&) = delete;
  Param& operator=(const Param&) = delete;

  Unit& unit() const {
    return unit_;
  }
  /// Relative to the outermost sharded module: "blocks.3.fc.weight".
  const std::string& name() const {
    return name_;
  }
  void set_name(std::string name);
  const layout::ParamLayout& layout() const {
    return layout_;
  }
  Bucket& bucket() const {
    return bucket_;
  }
  /// This rank among those that share the parameter.
  int rank() const {
    return rank_;
  }

  // -- the handle

  c10::ScalarType gathered_dtype() const {
    return gathered_;
  }
  int64_t gathered_bytes() const;
  /// Turns `tensor` (and whoever shares its TensorImpl) into the handle: full shape, hollow.
  void become_handle(at::Tensor tensor, c10::ScalarType dtype);
  /// The same for a tensor that consists of others, whose memory comes and goes.
  void become_handle_around(const at::Tensor& tensor, const std::vector<at::Tensor>& parts);
  bool is_handle(const at::Tensor& tensor) const {
    return handle_._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  }
  /// The handle; made anew if everybody let go of it.
  at::Tensor handle();
  /// Undefined then.
  at::Tensor present_handle() const {
    return at::Tensor(handle_.lock());
  }
  /// Puts memory under the handle, or takes it away (null).
  void set_whole(void* memory);
  /// Puts a writable copy under the handle, which takes its dtype and device until `end_copy`.
  void show_copy(const at::Tensor& copy);
  void end_copy();
  /// Of inputs that meet the handle: what `param_dtype` says, unless it shows a copy of another dtype.
  c10::ScalarType dtype_to_meet(c10::ScalarType param_dtype) const;
  /// The same for one of the tensors that the handle consists of.
  void set_part(size_t part, void* memory);
  /// A profiler begins, or ends, to note the addresses of all operators' arguments: that is no raw access.
  void let_look(bool looked_at);
  /// Somebody gave the handle memory of its own, from which it was never gathered.
  bool handle_was_replaced(const at::Tensor& handle) const;
  /// A view of memory as this parameter: full shape, its own strides, gathered dtype.
  at::Tensor view_as_whole(void* memory) const;
  /// The whole parameter's elements in memory order, as one dimension.
  at::Tensor flat_view_of_whole(void* memory) const;

  // -- the shard

  const at::Tensor& shard() const {
    return shard_;
  }
  c10::ScalarType shard_dtype() const {
    return shard_.scalar_type();
  }
  /// Where an optimizer will change it by such a gradient; null if nowhere, or if the host cannot see.
  const void* change_by(const at::Tensor& gradient) const;
  /// Moves the shard into a home's memory, with its present values.
  void move_shard(void* memory, std::shared_ptr<void> home, c10::Device device);
  /// Until it is moved, a new parameter's shard lies in the whole that it was made of. For one that is not to be moved.
  void leave_whole();
  /// The shard stays in the memory it has, which may be none: then its values are elsewhere, in tensors to watch.
  void settle_shard_in_place();
  /// From now on writes to `stored` count as writes to the shard.
  void watch(at::Tensor stored);
  /// Someone gave the shard's tensor other data (`module.to(dtype)`).
  bool shard_was_replaced() const;
  /// Just now, or its own again: it stays a shard, until the unit settles it.
  void shard_was_given_data();
  /// Whether data that the handle's tensor is given can go to the shard, as values of the whole.
  bool takes_values_of_handle() const;
  void take_values(const at::Tensor& whole);
  /// A holder of the handle that may lose it when the registered tensor is given data, as LibTorch's recurrent modules
  /// do.
  struct Forgetful {
    std::function<void(const at::Tensor& handle)> keep; ///< it may be about to
    std::function<void()> remind; ///< somebody was given the shard in the handle's place
  };
  void add_holder(Forgetful holder) {
    forgetful_.push_back(std::move(holder));
  }
  void keep_for_holders();
  void remind_holders() const;
  /// Takes over the data that users put behind what they are shown.
  void adopt_replacement();
  /// No memory yet: it comes through what users are shown.
  bool on_meta() const {
    return shard_.is_meta();
  }
  /// Then: memory without values.
  void give_memory(c10::Device device);
  /// The shard is about to have other values: no graph may go on with what it has saved of the handle.
  void values_change();
  /// This rank's piece of a whole tensor, copied.
  at::Tensor piece_of(const at::Tensor& whole) const;
  void show_as(std::shared_ptr<ShownShard> shown);
  /// This rank's piece of the gradient; undefined if there is none.
  at::Tensor shard_gradient() const;
  /// `zero_grad()`, say. (Not known where something else than the shard is shown.)
  bool gradient_was_dropped() const;
  /// A module keeps the handle registered, so that it is the handle's gradient that its `zero_grad()` drops.
  void note_handle_is_registered() {
    handle_is_registered_ = true;
  }
  /// The shard's goes with it.
  void follow_dropped_gradient();
  /// By us, not by users.
  void stand_in_was_taken_off() {
    stands_in_ = false;
  }
  /// Adds to the shard's gradient, or becomes it; then runs the hooks that wait for it. The gradient of a flat shard,
  /// if there is one.
  void give_shard_gradient(at::Tensor gradient);

  // -- gradients

  bool trainable() const {
    return shown_ ? shown_->requires_grad() : shard_.requires_grad();
  }
  /// What users see as the shard is frozen or thawed, and the handle.
  void train(bool wanted);
  /// Users set `requires_grad` on the shard or on the handle: the other follows the one that has changed.
  void follow_requires_grad() {
    const bool wanted = trainable();
    const c10::TensorImpl* handle = handle_._unsafe_get_target();
    if (handle_.expired()) {
      return;
    }
    if (handle->requires_grad() != wanted || (wanted && !hooked_)) {
      agree_on_requires_grad();
    } else {
      requires_grad_ = wanted;
    }
  }

  /// A checkpointed segment that uses it brings a gradient, once it is recomputed.
  void note_checkpointed_use(int64_t segment);
  /// A backward begins: `nested`, one within another, of which the counts above may know.
  void expect_gradient(const BackwardGraph& graph, bool nested);
  /// A gradient has arrived: takes it off the handle. Whether it is the last that its unit expects.
  bool take_gradient(const at::Tensor& handle);
  void forget_uses();
  /// Of a backward that broke off.
  void drop_gradient();
  /// See Unit.
  void move_waiting_gradient(WaitingMove move);
  /// Whether the next reduction of its unit has something to do for it.
  bool takes_part_in_reduction() const;
  /// The same where something is reduced for another of its bucket: the gradient of a flat parameter is one.
  bool joins_reduction() const {
    return takes_part_in_reduction() || (layout_.is_part_of_flat() && trainable());
  }

  at::Tensor gradient; ///< arrived, whole, in the reduce dtype; undefined if none
  at::Tensor partial; ///< this rank's slice, reduced over the shard dimension of a hybrid mesh only

 private:
  at::Tensor piece_in(const at::Tensor& whole) const; // where it lies, if it lies as a shard does; else a copy
  std::string why_hollow() const;
  void know_shard_again();
  void key_shard(const TensorGeometry& geometry);
  void hollow_out(at::Tensor tensor, const TensorGeometry& geometry);
  void install_handle(const at::Tensor& handle);
  void end_handle();
  void end_storages();
  void end_watching();
  void end_stand_in();
  void require_grad_of_shard(bool required);
  void agree_on_requires_grad();
  void add_gradient(at::Tensor arrived);
  void install_gradient_hooks(const at::Tensor& handle);
  void take_off_stand_in(at::Tensor& gradient);

  // Touches and arriving gradients look at these; with many units they come from far away each time, hence in one line.
  WeakTensor handle_;
  std::shared_ptr<ShownShard> shown_; // null: the shard itself
  at::Tensor shard_;
  WeakStorage shard_storage_; // which it was given last; users may give it other data
  int expected_ = 0; // gradients
  c10::ScalarType gathered_;
  bool hooked_ = false;
  bool stands_in_ = false; // the handle was given `stand_in_`
  bool handle_is_registered_ = false;
  bool requires_grad_ = false; // of the handle, when it agreed with the shard last

  Unit& unit_;
  Bucket& bucket_;
  int rank_;
  at::Tensor stand_in_; // see Role::kGradient
  WaitingGradient waiting_;
  int64_t last_segment_ = -1; // that used it; no two are the same
  struct HollowStorage {
    WeakStorage storage;
    std::string why_hollow; // while there is memory; else the storage has it
  };
  c10::SmallVector<HollowStorage, 1> handle_storages_; // one, unless the handle consists of several tensors
  // The handle as it is gathered, while it shows a copy of another dtype or device: views of it are views of this.
  at::Tensor put_aside_;
  c10::SmallVector<HollowStorage, 1> put_aside_storages_;
  layout::ParamLayout layout_;
  std::vector<int64_t> shard_sizes_, shard_strides_; // this rank's
  std::vector<WeakStorage> watched_;
  std::vector<Forgetful> forgetful_;
  bool replaced_ = false; // the shard's data, and it has the keys already
  std::string name_;
};

} // namespace fsdp::engine
