#pragma once

#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>

namespace fsdp {

/// `function(inputs...)` whose intermediate results are not kept: backward computes them again, with the random numbers
/// of the first time. May be nested. Returns what the function returns: one tensor, or a vector of them.
FSDP_API std::vector<at::Tensor> checkpoint_list(
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)> function,
    const std::vector<at::Tensor>& inputs);

template <typename Function, typename... Tensors>
at::Tensor checkpoint(Function function, const Tensors&... inputs) {
  auto apply = [function =
                    std::move(function)](const std::vector<at::Tensor>& given) mutable -> std::vector<at::Tensor> {
    return [&]<size_t... I>(std::index_sequence<I...>)->std::vector<at::Tensor> {
      return {function(given[I]...)};
    }
    (std::index_sequence_for<Tensors...>{});
  };
  return checkpoint_list(std::move(apply), {inputs...})[0];
}

} // namespace fsdp
