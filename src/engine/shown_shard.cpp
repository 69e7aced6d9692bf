#include <fsdp/shown_shard.h>

#include <utility>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp {

ShownShard::~ShownShard() = default;

void give_gradient_to(const at::Tensor& parameter, at::Tensor gradient) {
  const auto& hooks = torch::autograd::impl::hooks(parameter);
  for (const auto& hook : hooks) {
    gradient = (*hook)({std::move(gradient)})[0];
  }
  if (auto& present = parameter.mutable_grad(); present.defined()) {
    const c10::AutoGradMode no_grad(false);
    present.add_(gradient);
  } else { // what a hook keeps, or gives each time, is not ours to add to
    const bool ours = hooks.empty() || gradient.use_count() == 1;
    present = ours ? std::move(gradient) : gradient.clone();
  }
  if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter)) {
    (*hook)(parameter);
  }
}

} // namespace fsdp
