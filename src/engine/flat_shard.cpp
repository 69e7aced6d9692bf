#include "engine/flat_shard.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include "base/check.h"
#include "base/view_into.h"
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
    const at::Tensor& gradient = flat_->tensor().grad();
    return gradient.defined() ? flat_->part_of(param_, gradient) : gradient;
  }
  void give_gradient(at::Tensor) override {
    TORCH_INTERNAL_ASSERT(false, "the flat shard gets the gradient of all its parameters at once");
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

FlatShard::FlatShard(const FlatBucket& bucket) : bucket_(bucket), storage_(c10::intrusive_ptr<c10::StorageImpl>()) {
  const at::Tensor& first = bucket.params().front()->shard();
  tensor_ = at::empty({0}, first.options().requires_grad(false));
  tensor_.set_requires_grad(first.requires_grad());
}

FlatShard::~FlatShard() {
  leave_storage();
}

// Views of it may live on, as nobody's; or it dies just now, on another thread.
void FlatShard::leave_storage() {
  if (const auto storage = storage_.lock()) {
    tenant_->param = nullptr;
  }
}

void FlatShard::lie_in(void* memory, std::shared_ptr<void> home, c10::Device device) {
  const InternalScope scope;
  Param* first = bucket_.params().front();
  auto owned = std::make_unique<Tenant>(Tenant{Role::kFlatShard, first, std::move(home)});
  Tenant* tenant = owned.get();
  const int64_t share[] = {first->layout().cut().chunk}, step[] = {1};
  const at::Tensor flat = make_keyed_tensor(std::move(owned), memory, {share, step, first->shard_dtype(), device});
  int64_t end = 0;
  for (const Param* param : bucket_.params()) {
    const Cut& cut = param->layout().cut();
    const int64_t begin = std::min(cut.offset(param->rank()), share[0]);
    flat.narrow(0, end, begin - end).zero_();
    end = begin + cut.length(param->rank());
  }
  flat.narrow(0, end, share[0] - end).zero_();
  leave_storage();
  take_data(tensor_, flat);
  tenant_ = tenant;
  storage_ = flat.storage().getWeakStorageImpl();
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
  const auto sizes = param.layout().shard_sizes(param.rank()), strides = param.layout().shard_strides(param.rank());
  return flat.as_strided(sizes, strides, flat.storage_offset() + std::min(cut.offset(param.rank()), cut.chunk));
}

void FlatShard::give_gradient(const at::Tensor& gradient) {
  itself_.give_gradient(gradient);
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
