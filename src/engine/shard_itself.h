#pragma once

#include <utility>

#include <ATen/core/Tensor.h>

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
    give_gradient_to(shard_, std::move(piece));
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
