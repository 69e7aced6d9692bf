#pragma once

#include <functional>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "engine/param.h"

namespace torch::jit {
struct Module;
}

namespace fsdp::nn {

/// A place in which a module holds a parameter.
struct Slot {
  std::string path; ///< "blocks.3.fc.weight"
  at::Tensor tensor;
  /// Puts another tensor there; null where the module reads its registered parameters itself, so that the handle has to
  /// stay.
  std::function<void(const at::Tensor&)> replace;
};

/// All parameter slots of a module and its children, in the order of registration. Tied parameters have several.
std::vector<Slot> slots_of(torch::nn::Module& module, const std::string& prefix = "");
std::vector<Slot> slots_of(const torch::jit::Module& module);

/// The parameter behind a shard or a handle; null for any other tensor.
engine::Param* param_of(const at::Tensor& tensor);
bool is_handle(const at::Tensor& tensor);

} // namespace fsdp::nn
