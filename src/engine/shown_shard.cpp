#include <fsdp/shown_shard.h>

#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace fsdp {

ShownShard::~ShownShard() = default;

at::Tensor after_hooks(const at::Tensor& parameter, at::Tensor gradient) {
  const auto& hooks = torch::autograd::impl::hooks(parameter);
  for (const auto& hook : hooks) {
    gradient = (*hook)({std::move(gradient)})[0];
  }
  const bool kept = !hooks.empty() && gradient.use_count() > 1;
  return kept ? gradient.clone() : gradient;
}

} // namespace fsdp
