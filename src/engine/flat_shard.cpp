#include "engine/flat_shard.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "base/check.h"
#include "engine/flat_bucket.h"
#include "engine/internal_scope.h"
#include "engine/param.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

class PartOfFlat final : public ShownShard {
 public:
  PartOfFlat(std::shared_ptr<FlatShard> flat, const Param& param) : flat_(std::move(flat)), param_(param) {}

  bool requires_grad() const override {
    return flat_->tensor().requires_grad();
  }
  void set_requires_grad(bool requires_grad) override {
    FSDP_CHECK(
        requires_grad == flat_->tensor().requires_grad(),
        "[requires_grad] '{}' is part of a flat parameter, which is trained or frozen as a whole: set requires_grad on "
        "that one, or shard with use_orig_params=True",
        param_.name());
  }
  at::Tensor gradient() const override {
    const at::Tensor gradient = flat_->gradient();
    return gradient.defined() ? flat_->part_of(param_, gradient) : gradient;
  }
  void give_gradient(at::Tensor gradient) override { // of all its parameters at once
    give_gradient_to(flat_->tensor(), std::move(gradient));
  }
  bool replaced() const override {
    return flat_->was_replaced();
  }
  at::Tensor replacement() override {
    return flat_->part_of(param_, flat_->tensor().detach());
  }

 private:
  std::shared_ptr<FlatShard> flat_;
  const Param& param_;
};

} // namespace

FlatShard::FlatShard(const FlatBucket& bucket)
    : bucket_(bucket),
      together_(c10::intrusive_ptr<c10::StorageImpl>()),
      storage_(c10::intrusive_ptr<c10::StorageImpl>()) {
  const at::Tensor& first = bucket.params().front()->shard();
  tensor_ = at::empty({0}, first.options().requires_grad(false));
  tensor_.set_requires_grad(first.requires_grad());
}

FlatShard::~FlatShard() {
  leave(storage_);
}

void FlatShard::lie_in(void* memory, std::shared_ptr<void> home, c10::Device device) {
  const InternalScope scope;
  Param* first = bucket_.params().front();
  const int64_t share[] = {first->layout().cut().chunk}, step[] = {1};
  const TensorGeometry geometry{share, step, first->shard_dtype(), device};
  const at::Tensor keyed = make_keyed_tensor({Role::kFlatShard, first, std::move(home)}, memory, geometry);
  leave(storage_);
  take_data(tensor_, keyed);
  storage_ = keyed.storage().getWeakStorageImpl();
  clear_gaps(tensor_.detach());
  replaced_ = false;
}

void FlatShard::was_given_data() {
  if (is_strangers(tensor_)) {
    const InternalScope scope;
    leave(storage_);
    storage_ = key_in_place(tensor_, Role::kFlatShard, bucket_.params().front(), geometry_of(tensor_));
    replaced_ = true;
  }
}

// And the padding.
void FlatShard::clear_gaps(const at::Tensor& flat) const {
  int64_t end = 0;
  for (const Param* param : bucket_.params()) {
    const Cut& cut = param->layout().cut();
    const int64_t begin = std::min(cut.offset(param->rank()), cut.chunk);
    flat.narrow(0, end, begin - end).zero_();
    end = begin + cut.length(param->rank());
  }
  flat.narrow(0, end, flat.numel() - end).zero_();
}

at::Tensor FlatShard::share_of(const at::Tensor& whole) const {
  const Param& first = *bucket_.params().front();
  const int64_t chunk = first.layout().cut().chunk;
  at::Tensor share = whole.narrow(0, chunk * first.rank(), chunk).clone();
  clear_gaps(share);
  return share;
}

at::Tensor FlatShard::part_of(const Param& param, const at::Tensor& flat) const {
  const Cut& cut = param.layout().cut();
  FSDP_CHECK(
      flat.dim() == 1 && flat.numel() == cut.chunk,
      "[flat parameter] of '{}' was given data of sizes {} where the {} elements of this rank's share are needed: give "
      "it as many; whole values, a file's say, in a summon_full_params guard",
      param.name(),
      flat.sizes(),
      cut.chunk);
  const auto sizes = param.layout().shard_sizes(param.rank());
  auto strides = param.layout().shard_strides(param.rank());
  const int64_t step = flat.stride(0); // of what users give
  std::transform(strides.begin(), strides.end(), strides.begin(), [step](int64_t stride) { return stride * step; });
  const int64_t begin = std::min(cut.offset(param.rank()), cut.chunk);
  return flat.as_strided(sizes, strides, flat.storage_offset() + begin * step);
}

at::Tensor FlatShard::put_gradients_together() {
  at::Tensor whole;
  for (Param* param : bucket_.params()) {
    at::Tensor& gradient = param->gradient;
    const auto& cut = param->layout().cut();
    if (!gradient.defined()) {
      continue;
    }
    if (!whole.defined()) {
      const int64_t size[] = {cut.chunk * bucket_.shard_group().size()}, step[] = {1};
      const bool is_view = gradient.storage().unsafeGetStorageImpl() == together_._unsafe_get_target();
      whole = is_view ? gradient.as_strided(size, step, 0) : at::zeros(size, gradient.options());
      together_ = whole.storage().getWeakStorageImpl();
    }
    if (!gradient.is_alias_of(whole)) {
      const auto view = whole.as_strided(param->layout().sizes(), param->layout().strides(), cut.before);
      gradient = view.copy_(gradient);
    }
  }
  return whole;
}

void FlatShard::move_waiting_gradient(WaitingMove move) {
  const auto& params = bucket_.params();
  if (move == WaitingMove::kShow) {
    if (const at::Tensor whole = put_gradients_together(); whole.defined()) {
      const Cut& last = params.back()->layout().cut();
      const at::Tensor shown = whole.narrow(0, 0, last.before + last.numel); // without the padding
      waiting_.show(tensor_, shown, params.front()->unit());
    }
  } else if (waiting_.is_shown() && !waiting_.take_back(tensor_, params.front()->name())) {
    for (Param* param : params) {
      param->gradient.reset();
    }
  }
}

std::shared_ptr<ShownShard> FlatShard::shown_for(const Param& param) {
  return std::make_shared<PartOfFlat>(shared_from_this(), param);
}

FlatShard* flat_shard_of(const at::Tensor& tensor) {
  const Tenant* tenant = tenant_of(tensor);
  const bool is_flat = tenant != nullptr && tenant->role == Role::kFlatShard && tenant->param != nullptr;
  return is_flat ? tenant->param->bucket().flat_shard() : nullptr;
}

} // namespace fsdp::engine
