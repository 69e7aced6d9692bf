#include "engine/handle_meta.h"

#include <memory>
#include <utility>

#include <torch/csrc/autograd/variable.h>

#include "engine/param.h"
#include "engine/tenant.h"

namespace fsdp::engine {

namespace {

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

} // namespace

void show_gradient_while_shard_has_one(const at::Tensor& handle) {
  auto* former = torch::autograd::impl::materialize_autograd_meta(handle);
  if (former->is_view_ || former->grad_fn_ || dynamic_cast<HandleMeta*>(former) != nullptr) {
    return;
  }
  auto meta = std::make_unique<HandleMeta>();
  take_over<torch::autograd::AutogradMeta>(*meta, *former);
  handle.unsafeGetTensorImpl()->set_autograd_meta(std::move(meta));
}

} // namespace fsdp::engine
