#include <fsdp/deferred_init.h>

#include <algorithm>

#include <torch/nn/module.h>

#include "engine/recorded_storage.h"
#include "engine/recording.h"
#include "nn/slots.h"

namespace fsdp {

namespace {

/// Parameters and buffers as they are registered, of the module and of those below.
std::vector<at::Tensor> registered_tensors(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  module.apply([&](const torch::nn::Module& each) {
    for (const auto& item : nn::registered_parameters(each)) {
      tensors.push_back(item.value());
    }
    for (const auto& buffer : each.buffers(/*recurse=*/false)) {
      tensors.push_back(buffer);
    }
  });
  return tensors;
}

} // namespace

struct detail::RecordingScope::Impl {
  engine::Recording recording;
};

detail::RecordingScope::RecordingScope() : impl_(std::make_unique<Impl>()) {}
detail::RecordingScope::~RecordingScope() = default;

bool is_deferred(const at::Tensor& tensor) {
  return engine::recorded_storage_of(tensor) != nullptr;
}

bool is_deferred(ConstModuleRef module) {
  const auto tensors = registered_tensors(module.for_operation("is_deferred"));
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) { return is_deferred(tensor); });
}

void materialize(ModuleRef module) {
  for (const auto& tensor : registered_tensors(module.for_operation("materialize"))) {
    materialize(tensor);
  }
}

void materialize(const at::Tensor& tensor) {
  engine::materialize(tensor);
}

} // namespace fsdp
