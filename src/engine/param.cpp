#include "engine/param.h"

#include <memory>
#include <optional>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/variable.h>

#include "base/check.h"
#include "base/tensor_at.h"
#include "engine/bucket.h"
#include "engine/internal_scope.h"
#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

/// Its memory holds its elements, each as it is, where the strides say.
bool lies_as(const at::Tensor& tensor, c10::IntArrayRef strides) {
  return tensor.layout() == c10::kStrided && tensor.strides() == strides && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

/// A leaf goes on as the leaf of the graph that there is, while its tensor gets data of another dtype and its own
/// again.
class KeptLeaf {
 public:
  explicit KeptLeaf(const at::Tensor& leaf)
      : leaf_(leaf), device_(leaf.device()), autograd_(torch::autograd::impl::get_autograd_meta(leaf)) {
    if (autograd_ != nullptr) {
      adds_up_ = autograd_->grad_accumulator_;
    }
  }
  ~KeptLeaf() {
    if (adds_up_ && leaf_.device() == device_) { // else its gradients would come to the former device
      autograd_->grad_accumulator_ = *adds_up_;
    }
  }
  KeptLeaf(const KeptLeaf&) = delete;
  KeptLeaf& operator=(const KeptLeaf&) = delete;

 private:
  const at::Tensor& leaf_;
  c10::Device device_;
  torch::autograd::AutogradMeta* autograd_;
  std::optional<decltype(torch::autograd::AutogradMeta::grad_accumulator_)> adds_up_;
};

/// Autograd's data of a handle. What stands in for the gradient is seen as long as the shard has one: whoever drops the
/// gradients of `parameters()` does not come by here.
struct HandleMeta final : torch::autograd::AutogradMeta {
  const at::Tensor& grad() const override {
    static const at::Tensor none;
    return is_over() ? none : grad_;
  }
  at::Tensor& mutable_grad() override {
    if (is_over()) {
      tenant_of(grad_)->param->stand_in_was_taken_off();
      grad_.reset();
    }
    return grad_;
  }
  bool is_over() const {
    const Tenant* tenant = tenant_of(grad_);
    return tenant != nullptr && tenant->role == Role::kGradient && tenant->param != nullptr &&
           tenant->param->gradient_was_dropped();
  }
};

// Not every version of LibTorch has all of it.
template <typename Meta>
void take_over(Meta& meta, Meta& former) {
  meta.name_ = std::move(former.name_);
  meta.grad_ = std::move(former.grad_);
  meta.grad_accumulator_ = std::move(former.grad_accumulator_);
  meta.fw_grad_ = std::move(former.fw_grad_);
  meta.hooks_ = std::move(former.hooks_);
  meta.cpp_hooks_list_ = std::move(former.cpp_hooks_list_);
  meta.post_acc_grad_hooks_ = std::move(former.post_acc_grad_hooks_);
  meta.requires_grad_ = former.requires_grad_;
  if constexpr (requires { meta.grad_dtype_; }) {
    meta.grad_dtype_ = former.grad_dtype_;
  }
  if constexpr (requires { meta.allow_grad_dtype_mismatch_; }) {
    meta.allow_grad_dtype_mismatch_ = former.allow_grad_dtype_mismatch_;
  }
}

/// From now on `handle.grad()` is there as long as the shard has a gradient. Nothing for a tensor with a history.
void show_gradient_while_shard_has_one(const at::Tensor& handle) {
  auto* former = torch::autograd::impl::materialize_autograd_meta(handle);
  if (former->is_view_ || former->grad_fn_ || dynamic_cast<HandleMeta*>(former) != nullptr) {
    return;
  }
  auto meta = std::make_unique<HandleMeta>();
  take_over<torch::autograd::AutogradMeta>(*meta, *former);
  handle.unsafeGetTensorImpl()->set_autograd_meta(std::move(meta));
}

} // namespace

Param::Param(Unit& unit, Bucket& bucket, std::string name, const at::Tensor& original, layout::ParamLayout layout)
    : handle_(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()),
      shard_storage_(c10::intrusive_ptr<c10::StorageImpl>()),
      gathered_(original.scalar_type()),
      unit_(unit),
      bucket_(bucket),
      rank_(bucket.shard_group().rank()),
      layout_(std::move(layout)),
      shard_sizes_(layout_.shard_sizes(rank_)),
      shard_strides_(layout_.shard_strides(rank_)) {
  set_name(std::move(name));
  InternalScope scope;
  if (original.is_meta()) {
    shard_ = make_keyed_tensor(
        {Role::kShard, this, nullptr}, nullptr, {shard_sizes_, shard_strides_, original.scalar_type(), c10::kMeta});
    shard_storage_ = shard_.storage().getWeakStorageImpl();
    shard_.set_requires_grad(original.requires_grad());
    return;
  }
  shard_ = piece_in(original.detach());
  shard_.set_requires_grad(original.requires_grad());
}

void Param::set_name(std::string name) {
  name_ = std::move(name);
  for (auto& [weak_storage, why_hollow_later] : handle_storages_) {
    std::string text = why_hollow();
    if (!why_hollow_later.empty()) {
      why_hollow_later = std::move(text);
    } else if (const auto storage = weak_storage.lock()) {
      hollow_storage(*storage, text);
    }
  }
}

std::string Param::why_hollow() const {
  return phrase(
      "[fsdp] raw access to the parameter '{}', which is sharded at this moment: its memory is there while an operator "
      "reads it, between unshard() and reshard(), or inside summon_full_params. (Kernels that torch.compile generates "
      "read parameters so: compile with backend='aot_eager'.)",
      name_);
}

at::Tensor Param::piece_of(const at::Tensor& whole) const {
  const at::Tensor piece = piece_in(whole);
  return piece.is_alias_of(whole) ? piece.clone() : piece;
}

// A tensor like any other, and no view of a whole that may be of a subclass or made in inference mode.
at::Tensor Param::piece_in(const at::Tensor& source) const {
  FSDP_CHECK(
      source.sizes() == c10::IntArrayRef(layout_.sizes()),
      "[fully_shard] '{}' has sizes {}, so a tensor of sizes {} cannot take its place: give it values of the same "
      "sizes",
      name_,
      c10::IntArrayRef(layout_.sizes()),
      source.sizes());
  const auto options = source.options().requires_grad(false);
  at::Tensor whole = source;
  if (!lies_as(source, layout_.strides())) {
    whole = at::empty_strided(layout_.sizes(), layout_.strides(), options);
    whole.copy_(source);
  }
  const auto slices = layout_.in_place() ? whole : layout_.pack(whole);
  auto piece = at::empty({0}, options);
  piece.set_(slices.storage(), slices.storage_offset() + layout_.cut().begin(rank_), shard_sizes_, shard_strides_);
  return slices.is_alias_of(source) ? piece : piece.clone();
}

Param::~Param() {
  end_watching();
  end_stand_in();
  leave(shard_storage_);
}

int64_t Param::gathered_bytes() const {
  return layout_.numel() * static_cast<int64_t>(c10::elementSize(gathered_));
}

at::Tensor Param::view_as_whole(void* memory) const {
  const auto options = at::TensorOptions().dtype(gathered_).device(unit_.device());
  return tensor_at(memory, layout_.sizes(), layout_.strides(), options);
}

at::Tensor Param::flat_view_of_whole(void* memory) const {
  return tensor_at(memory, {layout_.numel()}, at::TensorOptions().dtype(gathered_).device(unit_.device()));
}

void Param::become_handle(at::Tensor tensor, c10::ScalarType dtype) {
  InternalScope scope;
  end_handle();
  hollow_out(tensor, {layout_.sizes(), layout_.strides(), dtype, unit_.device()});
  install_handle(tensor);
}

void Param::become_handle_around(const at::Tensor& tensor, const std::vector<at::Tensor>& parts) {
  InternalScope scope;
  end_handle();
  for (const auto& part : parts) {
    hollow_out(part, geometry_of(part));
  }
  install_handle(tensor);
}

void Param::end_handle() {
  end_storages();
  handle_storages_ = std::exchange(put_aside_storages_, {});
  end_storages();
  put_aside_.reset();
}

// Views of the former storages may live on, without memory.
void Param::end_storages() {
  for (auto& each : handle_storages_) {
    leave(each.storage);
  }
  handle_storages_.clear();
}

void Param::hollow_out(at::Tensor tensor, const TensorGeometry& geometry) {
  auto hollow = make_keyed_tensor({Role::kHandle, this, unit_.shared_from_this()}, nullptr, geometry);
  handle_storages_.push_back({hollow.storage().getWeakStorageImpl(), why_hollow()});
  take_data(tensor, hollow);
  hollow.reset();
  set_part(handle_storages_.size() - 1, nullptr);
}

void Param::end_stand_in() {
  if (Tenant* tenant = tenant_of(stand_in_)) { // none if the user gave the handle's gradient other data
    tenant->param = nullptr; // the handle may hold it on
  }
}

void Param::install_handle(const at::Tensor& handle) {
  gathered_ = handle.scalar_type();
  if (!is_handle(handle)) {
    requires_grad_ = handle.requires_grad(); // what it says so far is nobody's wish
    hooked_ = stands_in_ = false;
  }
  handle_ = WeakTensor(handle.getIntrusivePtr());
  end_stand_in();
  const at::Tensor former = std::exchange(
      stand_in_,
      make_keyed_tensor(
          {Role::kGradient, this, nullptr}, nullptr, {layout_.sizes(), layout_.strides(), gathered_, handle.device()}));
  if (stands_in_ && handle.grad().is_same(former)) {
    handle.mutable_grad() = stand_in_;
  }
  show_gradient_while_shard_has_one(handle);
  follow_requires_grad();
}

at::Tensor Param::handle() {
  auto impl = handle_.lock();
  if (!impl) {
    at::Tensor fresh = at::empty({0}, at::TensorOptions().dtype(gathered_).device(unit_.device()));
    become_handle(fresh, gathered_);
    bucket_.place(*this);
    return fresh;
  }
  return at::Tensor(std::move(impl));
}

bool Param::handle_was_replaced(const at::Tensor& handle) const {
  if (handle_storages_.size() == 1 && !handle.key_set().has(c10::DispatchKey::Python)) { // views may keep ours alive
    return handle.storage().unsafeGetStorageImpl() != handle_storages_[0].storage._unsafe_get_target();
  }
  return std::all_of(
      handle_storages_.begin(), handle_storages_.end(), [](const auto& each) { return each.storage.expired(); });
}

void Param::set_whole(void* memory) {
  for (size_t part = 0; part < handle_storages_.size(); ++part) {
    set_part(part, memory);
  }
}

void Param::set_part(size_t part, void* memory) {
  const auto storage = part < handle_storages_.size() ? handle_storages_[part].storage.lock() : nullptr;
  if (!storage) {
    return;
  }
  std::string& why_hollow = handle_storages_[part].why_hollow;
  if (memory != nullptr || unit_.runtime().is_looked_at()) {
    fill_storage(*storage, memory, why_hollow);
  } else {
    hollow_storage(*storage, why_hollow);
  }
}

void Param::let_look(bool looked_at) {
  for (auto* storages : {&handle_storages_, &put_aside_storages_}) {
    for (auto& [weak_storage, why_hollow] : *storages) {
      const auto storage = weak_storage.lock();
      if (!storage || storage->nbytes() == 0 || storage->_mutable_data_ptr_no_checks().get() != nullptr) {
        continue;
      }
      looked_at ? fill_storage(*storage, nullptr, why_hollow) : hollow_storage(*storage, why_hollow);
    }
  }
}

void Param::show_copy(const at::Tensor& copy) {
  const bool as_gathered = copy.scalar_type() == gathered_ && copy.device() == unit_.device();
  if (const at::Tensor handle = present_handle(); !as_gathered && handle.defined() && !put_aside_.defined()) {
    InternalScope scope;
    const KeptLeaf kept(handle);
    put_aside_ = handle.alias();
    put_aside_storages_ = std::exchange(handle_storages_, {});
    hollow_out(handle, {layout_.sizes(), layout_.strides(), copy.scalar_type(), copy.device()});
  }
  set_whole(copy.data_ptr());
}

void Param::end_copy() {
  if (!put_aside_.defined()) {
    return;
  }
  InternalScope scope;
  const at::Tensor handle = present_handle();
  const bool is_ours = handle.defined() && !handle_was_replaced(handle);
  end_storages();
  handle_storages_ = std::exchange(put_aside_storages_, {});
  const at::Tensor gathered = std::exchange(put_aside_, {});
  if (is_ours) {
    const KeptLeaf kept(handle);
    take_data(handle, gathered);
  }
}

c10::ScalarType Param::dtype_to_meet(c10::ScalarType param_dtype) const {
  return put_aside_.defined() && c10::isFloatingType(shard_dtype()) ? shard_dtype() : param_dtype;
}

} // namespace fsdp::engine
