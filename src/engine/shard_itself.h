#pragma once

#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <fsdp/shown_shard.h>

namespace fsdp::engine {

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
    piece = after_hooks(shard_, std::move(piece));
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

} // namespace fsdp::engine
