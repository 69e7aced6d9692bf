#pragma once

#include <torch/torch.h>

namespace fsdp::testing {

/// A layer whose weight is read inside a function only, as fused layers do.
struct FusedLinear : torch::autograd::Function<FusedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.mm(weight.t());
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].mm(saved[1]), gradients[0].t().mm(saved[0])};
  }
};

} // namespace fsdp::testing
