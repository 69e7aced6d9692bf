#pragma once

#include <optional>
#include <string>
#include <utility>

#include <ATen/core/VariableHooksInterface.h>

namespace fsdp::engine {

/// LibTorch's implementation of the tensors' methods that are no operators, behind a class of which we may override
/// some. What one version of LibTorch has and another has not could not say `override`; so none does.
class ForwardingHooks : public at::impl::VariableHooksInterface {
  using Hooks = at::impl::VariableHooksInterface;
  using Base = at::TensorBase;
  using Node = decltype(std::declval<const Hooks&>().grad_fn(std::declval<const Base&>()));
  using DType = std::optional<c10::ScalarType>;

 public:
  explicit ForwardingHooks(const Hooks& next) : next_(next) {}

  // NOLINTBEGIN(modernize-use-override)

  Base tensor_data(const Base& self) const {
    return next_.tensor_data(self);
  }
  Base variable_data(const Base& self) const {
    return next_.variable_data(self);
  }
  Node grad_fn(const Base& self) const {
    return next_.grad_fn(self);
  }
  unsigned _register_hook(const Base& self, std::function<Base(const Base&)> hook) const {
    return next_._register_hook(self, std::move(hook));
  }
  void remove_hook(const Base& self, unsigned position) const {
    next_.remove_hook(self, position);
  }
  bool is_view(const Base& self) const {
    return next_.is_view(self);
  }
  const Base& base(const Base& self) const {
    return next_.base(self);
  }
  const std::string& name(const Base& self) const {
    return next_.name(self);
  }
  bool is_leaf(const Base& self) const {
    return next_.is_leaf(self);
  }
  int64_t output_nr(const Base& self) const {
    return next_.output_nr(self);
  }
  void set_data(const Base& self, const Base& data) const {
    next_.set_data(self, data);
  }
  Base data(const Base& self) const {
    return next_.data(self);
  }
  int64_t _version(const Base& self) const {
    return next_._version(self);
  }
  void retain_grad(const Base& self) const {
    next_.retain_grad(self);
  }
  bool retains_grad(const Base& self) const {
    return next_.retains_grad(self);
  }
  void _backward(
      const at::Tensor& self,
      at::TensorList inputs,
      const std::optional<at::Tensor>& gradient,
      std::optional<bool> keep_graph,
      bool create_graph) const {
    next_._backward(self, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const Base& self, bool requires_grad) const {
    next_.requires_grad_(self, requires_grad);
  }
  void basic_autograd_not_implemented_fallback(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    next_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  DType grad_dtype(const Base& self) const {
    return [&](const auto& next) -> DType {
      if constexpr (requires { next.grad_dtype(self); }) {
        return next.grad_dtype(self);
      }
      return std::nullopt;
    }(next_);
  }
  void set_grad_dtype(const Base& self, const DType& dtype) const {
    [&](const auto& next) {
      if constexpr (requires { next.set_grad_dtype(self, dtype); }) {
        next.set_grad_dtype(self, dtype);
      }
    }(next_);
  }
  // NOLINTEND(modernize-use-override)

 private:
  const Hooks& next_;
};

} // namespace fsdp::engine
