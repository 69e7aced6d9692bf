#include "engine/param.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "base/caller.h"
#include "base/check.h"
#include "base/view_into.h"
#include "engine/backward_graph.h"
#include "engine/bucket.h"
#include "engine/forward_graph.h"
#include "engine/internal_scope.h"
#include "engine/runtime.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

/// Runs after a backward has put a handle's gradient together.
struct GradientHook : torch::autograd::PostAccumulateGradHook {
  explicit GradientHook(Param* param) : param(param), unit(param->unit().weak_from_this()), name(param->name()) {}
  void operator()(const torch::autograd::Variable& handle) override {
    called_by_torch([&] { arrived(handle); });
  }
  void arrived(const at::Tensor& handle) {
    const auto alive = unit.lock(); // the handle's storage keeps it, unless the tensor was given another
    FSDP_CHECK(
        alive && !param->handle_was_replaced(handle),
        "[backward] the data of '{}' were replaced after fully_shard, so that it is trained no more: copy new values "
        "into it in no-grad mode, or into the shard that parameters() shows",
        name);
    alive->runtime().gradient_arrived(*param, handle);
  }
  Param* param; // lives as long as its unit
  std::weak_ptr<Unit> unit;
  std::string name;
};

/// Users are shown the shard itself.
class ShardItself final : public ShownShard {
 public:
  explicit ShardItself(at::Tensor& shard) : shard_(shard) {}

  bool requires_grad() const override {
    return shard_.requires_grad();
  }
  void set_requires_grad(bool requires_grad) override {
    shard_.set_requires_grad(requires_grad);
  }
  at::Tensor gradient() const override {
    return shard_.grad();
  }
  void give_gradient(at::Tensor piece) override {
    auto& current = shard_.mutable_grad();
    if (current.defined()) {
      current.add_(piece);
    } else {
      current = std::move(piece);
    }
    if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(shard_)) {
      (*hook)(shard_);
    }
  }
  bool replaced() const override {
    return false; // other data in the same tensor are another tenant's, or nobody's
  }
  at::Tensor replacement() override {
    return shard_;
  }

 private:
  at::Tensor& shard_; // the parameter's
};

/// Its memory holds its elements, each as it is, where the strides say.
bool lies_as(const at::Tensor& tensor, c10::IntArrayRef strides) {
  return tensor.layout() == c10::kStrided && tensor.strides() == strides && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

} // namespace

Param::Param(Unit& unit, Bucket& bucket, std::string name, const at::Tensor& original, layout::DimLayout layout)
    : handle_(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()),
      shown_(std::make_shared<ShardItself>(shard_)),
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
    auto owned = std::make_unique<Tenant>(Tenant{Role::kShard, this, nullptr});
    Tenant* tenant = owned.get();
    shard_ = make_keyed_tensor(
        std::move(owned), nullptr, {shard_sizes_, shard_strides_, original.scalar_type(), c10::kMeta});
    note_shard_storage(tenant);
    shard_.set_requires_grad(original.requires_grad());
    return;
  }
  shard_ = piece_in(original.detach());
  shard_.set_requires_grad(original.requires_grad());
}

void Param::set_name(std::string name) {
  name_ = std::move(name);
  for (auto& [storage, tenant, why_hollow_later] : handle_storages_) {
    std::string text = why_hollow();
    if (!why_hollow_later.empty()) {
      why_hollow_later = std::move(text);
    } else if (storage != nullptr) {
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
  piece.set_(slices.storage(), slices.storage_offset() + layout_.begin(rank_), shard_sizes_, shard_strides_);
  return slices.is_alias_of(source) ? piece : piece.clone();
}

Param::~Param() {
  end_watching();
  end_stand_in();
  leave_shard_storage();
}

int64_t Param::gathered_bytes() const {
  return layout_.numel() * static_cast<int64_t>(c10::elementSize(gathered_));
}

at::Tensor Param::view_as_whole(void* memory, c10::ScalarType dtype, c10::Device device) const {
  return at::from_blob(memory, layout_.sizes(), layout_.strides(), at::TensorOptions().dtype(dtype).device(device));
}

at::Tensor Param::flat_view_of_whole(void* memory, c10::ScalarType dtype, c10::Device device) const {
  return at::from_blob(memory, {layout_.numel()}, at::TensorOptions().dtype(dtype).device(device));
}

void Param::become_handle(at::Tensor tensor, c10::ScalarType dtype, c10::Device device) {
  InternalScope scope;
  end_handle();
  hollow_out(tensor, {layout_.sizes(), layout_.strides(), dtype, device});
  install_handle(tensor, dtype, device);
}

void Param::become_handle_around(const at::Tensor& tensor, const std::vector<at::Tensor>& parts) {
  InternalScope scope;
  end_handle();
  for (const auto& part : parts) {
    const auto sizes = part.sizes().vec(), strides = part.strides().vec();
    hollow_out(part, {sizes, strides, part.scalar_type(), part.device()});
  }
  install_handle(tensor, tensor.scalar_type(), tensor.device());
}

void Param::end_handle() {
  end_storages();
  handle_storages_ = std::exchange(put_aside_storages_, {});
  end_storages();
  put_aside_.reset();
}

// Views of the former storages may live on, without memory.
void Param::end_storages() {
  for (const auto& each : handle_storages_) {
    if (each.storage != nullptr) {
      each.tenant->param = nullptr;
    }
  }
  handle_storages_.clear();
}

void Param::hollow_out(at::Tensor tensor, const TensorGeometry& geometry) {
  auto owned = std::make_unique<Tenant>(Tenant{Role::kHandle, this, unit_.shared_from_this()});
  Tenant* tenant = owned.get();
  auto hollow = make_keyed_tensor(std::move(owned), nullptr, geometry);
  handle_storages_.push_back({hollow.storage().unsafeGetStorageImpl(), tenant, why_hollow()});
  take_data(tensor, hollow);
  hollow.reset();
  set_part(handle_storages_.size() - 1, nullptr);
}

void Param::end_stand_in() {
  if (Tenant* tenant = tenant_of(stand_in_)) { // none if the user gave the handle's gradient other data
    tenant->param = nullptr; // the handle may hold it on
  }
}

void Param::install_handle(const at::Tensor& handle, c10::ScalarType dtype, c10::Device device) {
  gathered_ = dtype;
  if (!is_handle(handle)) {
    requires_grad_ = handle.requires_grad(); // what it says so far is nobody's wish
  }
  handle_ = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(handle.getIntrusivePtr());
  auto gradient_tenant = std::make_unique<Tenant>(Tenant{Role::kGradient, this, nullptr});
  end_stand_in();
  stand_in_ =
      make_keyed_tensor(std::move(gradient_tenant), nullptr, {layout_.sizes(), layout_.strides(), dtype, device});
  hooked_ = false;
  follow_requires_grad();
}

at::Tensor Param::handle() {
  auto impl = handle_.lock();
  if (!impl) {
    at::Tensor fresh = at::empty({0}, at::TensorOptions().dtype(gathered_).device(unit_.device()));
    become_handle(fresh, gathered_, unit_.device());
    unit_.place(*this);
    return fresh;
  }
  return at::Tensor(std::move(impl));
}

void Param::storage_died(const Tenant* tenant) {
  if (tenant == shard_tenant_) {
    shard_storage_ = nullptr;
    shard_tenant_ = nullptr;
  }
  std::erase(watched_, tenant);
  for (auto& each : handle_storages_) {
    each.storage = each.tenant == tenant ? nullptr : each.storage;
  }
}

bool Param::handle_was_replaced(const at::Tensor& handle) const {
  if (handle_storages_.size() == 1 && !handle.key_set().has(c10::DispatchKey::Python)) { // views may keep ours alive
    return handle.storage().unsafeGetStorageImpl() != handle_storages_[0].storage;
  }
  return std::all_of(
      handle_storages_.begin(), handle_storages_.end(), [](const auto& each) { return each.storage == nullptr; });
}

void Param::set_whole(void* memory) {
  for (size_t part = 0; part < handle_storages_.size(); ++part) {
    set_part(part, memory);
  }
}

void Param::set_part(size_t part, void* memory) {
  if (part >= handle_storages_.size() || handle_storages_[part].storage == nullptr) {
    return;
  }
  auto& [storage, tenant, why_hollow] = handle_storages_[part];
  if (memory != nullptr || storage->nbytes() == 0 || unit_.runtime().is_looked_at()) {
    fill_storage(*storage, memory, why_hollow);
  } else {
    hollow_storage(*storage, why_hollow);
  }
}

void Param::let_look(bool looked_at) {
  for (auto* storages : {&handle_storages_, &put_aside_storages_}) {
    for (auto& [storage, tenant, why_hollow] : *storages) {
      if (storage == nullptr || storage->nbytes() == 0 || storage->_mutable_data_ptr_no_checks().get() != nullptr) {
        continue;
      }
      looked_at ? fill_storage(*storage, nullptr, why_hollow) : hollow_storage(*storage, why_hollow);
    }
  }
}

void Param::show_copy(const at::Tensor& copy) {
  const bool as_gathered = copy.scalar_type() == gathered_ && copy.device() == unit_.device();
  if (at::Tensor handle(handle_.lock()); !as_gathered && handle.defined() && !put_aside_.defined()) {
    InternalScope scope;
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
  at::Tensor handle(handle_.lock());
  const bool is_ours = handle.defined() && !handle_was_replaced(handle);
  end_storages();
  handle_storages_ = std::exchange(put_aside_storages_, {});
  const at::Tensor gathered = std::exchange(put_aside_, {});
  if (is_ours) {
    handle.set_data(gathered);
  }
}

c10::ScalarType Param::dtype_to_meet(c10::ScalarType param_dtype) const {
  return put_aside_.defined() && c10::isFloatingType(shard_dtype()) ? shard_dtype() : param_dtype;
}

bool Param::shard_was_replaced() const {
  return shown_->replaced() || (!shard_is_in_its_storage() && !on_meta());
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
}

at::Tensor Param::shard_gradient() const {
  return shown_->gradient();
}

void Param::move_shard(void* memory, std::shared_ptr<void> home, c10::Device device) {
  InternalScope scope;
  FSDP_CHECK(
      shard_.sizes() == c10::IntArrayRef(shard_sizes_),
      "[fully_shard] the shard of '{}' was replaced by data of sizes {} where {} are needed: give it this rank's piece "
      "only",
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
}

void Param::leave_whole() {
  if (!on_meta()) {
    shard_.set_data(shard_.clone());
  }
}

void Param::settle_shard_in_place() {
  if (shard_is_in_its_storage()) {
    return;
  }
  InternalScope scope;
  auto owned = std::make_unique<Tenant>(Tenant{Role::kShard, this, std::make_shared<c10::Storage>(shard_.storage())});
  Tenant* tenant = owned.get();
  void* memory = shard_.numel() == 0 ? nullptr : shard_.data_ptr();
  leave_shard_storage();
  shard_.set_data(make_keyed_tensor(
      std::move(owned), memory, {shard_sizes_, shard_strides_, shard_.scalar_type(), shard_.device()}));
  note_shard_storage(tenant);
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

void Param::give_shard_gradient(at::Tensor gradient) {
  if (gradient.sizes() != c10::IntArrayRef(shard_sizes_) || gradient.strides() != c10::IntArrayRef(shard_strides_)) {
    gradient = view_into(gradient, gradient.scalar_type(), shard_sizes_, shard_strides_, 0);
  }
  if (gradient.scalar_type() != shard_.scalar_type() || gradient.device() != shard_.device()) {
    gradient = gradient.to(shard_.device(), shard_.scalar_type());
  }
  UserScope scope;
  shown_->give_gradient(std::move(gradient));
}

void Param::agree_on_requires_grad() {
  at::Tensor handle(handle_.lock());
  if (handle.requires_grad() != requires_grad_) {
    shown_->set_requires_grad(handle.requires_grad());
  }
  const bool wanted = trainable();
  if (handle.is_leaf() && handle.requires_grad() != wanted) {
    handle.set_requires_grad(wanted);
  }
  requires_grad_ = handle.requires_grad();
  if (wanted && !hooked_) {
    install_gradient_hooks(handle);
    hooked_ = true;
  }
}

void Param::install_gradient_hooks(const at::Tensor& handle) {
  torch::autograd::impl::set_post_acc_grad_hooks(handle, std::make_unique<GradientHook>(this));
  handle.register_hook(
      [impl = handle.unsafeGetTensorImpl(), stand_in = stand_in_.unsafeGetTensorImpl()](const at::Tensor&) {
        // What stands in for the last gradient must not be added to the next.
        auto& gradient = impl->mutable_grad();
        if (gradient.unsafeGetTensorImpl() == stand_in) {
          gradient.reset();
        }
      });
}

void Param::note_in(ForwardGraph& graph) const {
  if (const at::Tensor handle(handle_.lock()); handle.defined()) {
    graph.note(handle);
  }
}

void Param::note_checkpointed_use(int64_t segment) {
  if (segment != last_segment_) {
    last_segment_ = segment;
    unit_.expect_gradients(expected_++ == 0);
  }
}

void Param::expect_gradient(const BackwardGraph& graph, bool nested) {
  if (nested && expected_ > 0) {
    return;
  }
  if (const at::Tensor handle(handle_.lock()); handle.defined() && graph.reaches(handle)) {
    unit_.expect_gradients(expected_++ == 0);
  }
}

void Param::take_gradient(const at::Tensor& handle) {
  if (at::Tensor arrived = handle.grad(); arrived.defined()) {
    handle.mutable_grad() = stand_in_;
    if (trainable()) {
      add_gradient(std::move(arrived));
    }
  } // else it was frozen since the graph was made, and so was its handle
  if (expected_ > 0) {
    unit_.gradient_came(--expected_ == 0);
  }
}

void Param::add_gradient(at::Tensor arrived) {
  unit_.gradient_on_stream(/*adds=*/gradient.defined());
  if (arrived.requires_grad()) {
    arrived = arrived.detach();
  }
  if (arrived.layout() != c10::kStrided) {
    arrived = arrived.to_dense();
  }
  const bool of_a_subclass = arrived.key_set().has(c10::DispatchKey::Python);
  if (of_a_subclass || arrived.strides() != c10::IntArrayRef(layout_.strides())) {
    auto dense = at::empty_strided(layout_.sizes(), layout_.strides(), arrived.options());
    dense.copy_(arrived);
    arrived = dense;
  }
  if (gradient.defined()) {
    gradient.add_(arrived);
  } else {
    gradient = std::move(arrived);
    if (const auto dtype = unit_.reduce_dtype_of(*this); gradient.scalar_type() != dtype) {
      gradient = gradient.to(dtype);
    }
  }
}

void Param::forget_uses() {
  expected_ = 0;
}

bool Param::takes_part_in_reduction() const {
  const UnitPolicy& policy = unit_.policy;
  const bool was_put_off = partial.defined() && policy.requires_all_reduce;
  return gradient.defined() || was_put_off || (policy.reduce_unused_params && trainable());
}

} // namespace fsdp::engine
