#include "engine/given_tensors.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "engine/internal_scope.h"
#include "engine/replay.h"
#include "engine/tensor_arguments.h"

namespace fsdp::engine {

namespace {

/// They write all of their first argument and read nothing of it.
bool overwrites_first_argument(std::string_view name) {
  constexpr std::array<std::string_view, 11> kNames{
      "aten::uniform_",
      "aten::normal_",
      "aten::random_",
      "aten::bernoulli_",
      "aten::exponential_",
      "aten::log_normal_",
      "aten::cauchy_",
      "aten::geometric_",
      "aten::zero_",
      "aten::fill_",
      "aten::copy_"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

// One piece of memory for all, as long as a recording goes on: had each its own, what is kept of the recording would
// come to lie in the holes that they leave in the heap, and the next one beyond.
at::Tensor& scratch_bytes() {
  static thread_local at::Tensor bytes;
  return bytes;
}

at::Tensor scratch_like(const at::Tensor& tensor) {
  const auto bytes =
      static_cast<int64_t>(at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size()));
  at::Tensor& scratch = scratch_bytes();
  if (!scratch.defined() || scratch.numel() < bytes) {
    scratch.reset();
    scratch = at::empty({bytes}, c10::kByte);
  }
  const at::Tensor view = at::empty({0}, tensor.scalar_type());
  view.set_(scratch.storage(), 0, tensor.sizes(), tensor.strides());
  return view;
}

} // namespace

void forget_scratch() {
  scratch_bytes().reset();
}

GivenTensors::GivenTensors(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
    : op_(op), traits_(traits_of(op)), arguments_(torch::jit::last(stack, op.schema().arguments().size())) {
  const bool overwrites = overwrites_first_argument(op.schema().name());
  for (size_t i = 0; i < arguments_.size(); ++i) {
    const bool written = traits_.writes_argument(i);
    c10::IValue argument = arguments_[i];
    change_tensors(argument, [&](const at::Tensor& tensor) {
      auto* recorded = recorded_storage_of(tensor);
      const bool covers =
          recorded != nullptr && tensor.is_non_overlapping_and_dense() && tensor.nbytes() == recorded->memory->bytes;
      all_.push_back({tensor, recorded, written, written && i == 0 && overwrites, covers});
    });
  }
}

const c10::IValue* GivenTensors::argument(const char* name) const {
  const int index = index_of_argument(op_.schema(), name);
  return index < 0 ? nullptr : &arguments_[index];
}

torch::jit::Stack GivenTensors::arguments_with(const std::vector<at::Tensor>& tensors) const {
  torch::jit::Stack stack;
  size_t next = 0;
  for (c10::IValue argument : arguments_) {
    change_tensors(argument, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
    stack.push_back(std::move(argument));
  }
  return stack;
}

bool GivenTensors::needs_values(const GivenTensor& given) const {
  return given.recorded != nullptr && !traits_.reads_nothing && !given.overwritten;
}

std::vector<at::Tensor> GivenTensors::with_values() const {
  Replay replay;
  for (const GivenTensor& given : all_) {
    if (needs_values(given)) {
      replay.add(described(given.tensor, /*with_values=*/true));
    }
  }
  replay.run();
  const InternalScope scope;
  std::vector<at::Tensor> tensors;
  for (const auto& given : all_) {
    if (needs_values(given)) {
      tensors.push_back(replay.tensor(described(given.tensor, /*with_values=*/true)));
    } else if (given.recorded != nullptr && given.overwritten && given.tensor.is_cpu()) { // one of an operator's at
                                                                                          // most
      tensors.push_back(scratch_like(given.tensor));
    } else if (given.recorded != nullptr) {
      const auto options = given.tensor.options().requires_grad(false);
      tensors.push_back(at::empty_strided(given.tensor.sizes(), given.tensor.strides(), options));
    } else {
      tensors.push_back(given.tensor);
    }
  }
  return tensors;
}

std::optional<c10::Device> GivenTensors::device_of_results() const {
  std::optional<c10::Device> common;
  for (const GivenTensor& given : all_) {
    if (common && *common != given.tensor.device()) {
      return std::nullopt;
    }
    common = given.tensor.device();
  }
  const c10::IValue* device = argument("device");
  if (device == nullptr || !device->isDevice()) {
    return common.value_or(c10::kCPU);
  }
  const c10::Device asked = device->toDevice();
  return common && *common != asked ? std::nullopt : std::optional(asked);
}

} // namespace fsdp::engine
