#pragma once

#include <concepts>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>
#include <fsdp/module_ref.h>
#include <fsdp/wrap.h>

namespace fsdp {

/// `function(inputs...)` whose intermediate results are not kept: backward computes them again, with the random numbers
/// of the first time. May be nested. Returns what the function returns: one tensor, or a vector of them.
FSDP_API std::vector<at::Tensor> checkpoint_list(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function,
    const std::vector<at::Tensor>& inputs);

template <typename Function, std::convertible_to<at::Tensor>... Tensors>
auto checkpoint(Function function, const Tensors&... inputs) {
  auto call = [function = std::move(function)](const std::vector<at::Tensor>& given) mutable {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return function(given[I]...);
    }
    (std::index_sequence_for<Tensors...>{});
  };
  if constexpr (std::convertible_to<std::invoke_result_t<decltype(call)&, std::vector<at::Tensor>>, at::Tensor>) {
    auto apply = [call = std::move(call)](const std::vector<at::Tensor>& given) mutable {
      return std::vector<at::Tensor>{call(given)};
    };
    return checkpoint_list(std::move(apply), {inputs...})[0];
  } else {
    return checkpoint_list(std::move(call), {inputs...});
  }
}

/// From now on calls of the modules below `module` that the policy chooses (a function of the module and its size,
/// classes, any other of wrap.h) run as `checkpoint` runs a function, wherever their boundary is seen: `fsdp::call`,
/// holders of FSDP_MODULE. `module` itself is not chosen. Before `fully_shard` or after, or without. Returns the paths
/// of those chosen. A warning names a module whose parameters get gradients and that was never called so: in a
/// Sequential, say, or by its `forward`. What `clone` makes is not marked.
FSDP_API std::vector<std::string> apply_activation_checkpointing(ModuleRef module, const AutoWrapPolicy& policy);

} // namespace fsdp
