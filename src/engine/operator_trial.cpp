#include "engine/operator_trial.h"

#include <algorithm>
#include <exception>
#include <unordered_map>

#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>

#include "engine/internal_scope.h"
#include "engine/tensor_arguments.h"

namespace fsdp::engine {

namespace {

/// Tensors on the meta device that stand for others in a trial of an operator: alike, but for their values.
class StandIns {
 public:
  /// Views of one storage have stand-ins that are.
  at::Tensor of(const at::Tensor& tensor, bool differentiable);

 private:
  std::unordered_map<const c10::StorageImpl*, c10::Storage> storages_;
};

at::Tensor StandIns::of(const at::Tensor& tensor, bool differentiable) {
  at::Tensor stand_in;
  {
    const InternalScope scope;
    const auto options = at::TensorOptions().device(c10::kMeta);
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(storage);
    if (found == storages_.end()) {
      const auto bytes = at::empty({static_cast<int64_t>(storage->nbytes())}, options.dtype(c10::kByte));
      found = storages_.emplace(storage, bytes.storage()).first;
    }
    stand_in = at::empty({0}, options.dtype(tensor.scalar_type()));
    stand_in.set_(found->second, tensor.storage_offset(), tensor.sizes(), tensor.strides());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      stand_in.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
  }
  if (differentiable && tensor.requires_grad()) {
    stand_in.set_requires_grad(true);
  }
  return stand_in;
}

OperatorTrial try_on_stand_ins(const GivenTensors& call) {
  StandIns stand_ins;
  OperatorTrial trial{{}, {}, /*on_values=*/false};
  for (const GivenTensor& given : call.all()) {
    trial.given.push_back(stand_ins.of(given.tensor, /*differentiable=*/!given.written));
  }
  trial.returned = call.arguments_with(trial.given);
  const auto& schema = call.op().schema();
  const int device = index_of_argument(schema, "device"), pinned = index_of_argument(schema, "pin_memory");
  if (device >= 0 && (call.all().empty() || !trial.returned[device].isNone())) {
    trial.returned[device] = c10::Device(c10::kMeta);
  }
  if (pinned >= 0) {
    trial.returned[pinned] = c10::IValue();
  }
  const c10::impl::ExcludeDispatchKeyGuard inside(kKeys);
  call.op().callBoxed(trial.returned);
  return trial;
}

bool is_view_of_given(const at::Tensor& result, const OperatorTrial& trial) {
  return std::any_of(trial.given.begin(), trial.given.end(), [&](const at::Tensor& tensor) {
    return tensor.has_storage() && result.has_storage() && result.is_alias_of(tensor);
  });
}

} // namespace

OperatorTrial try_operator_on_values(const GivenTensors& call) {
  OperatorTrial trial{call.with_values(), {}, /*on_values=*/true};
  trial.returned = call.arguments_with(trial.given);
  const InternalScope scope;
  call.op().callBoxed(trial.returned);
  return trial;
}

// Not every operator has a kernel for tensors without values; a mistake of the caller's shows again on values.
OperatorTrial try_operator(const GivenTensors& call) {
  if (!call.device_of_results()) {
    return try_operator_on_values(call);
  }
  try {
    return try_on_stand_ins(call);
  } catch (const std::exception&) {
    return try_operator_on_values(call);
  }
}

bool returned_views(const OperatorTrial& trial) {
  bool any = false, all = true;
  for (c10::IValue value : trial.returned) {
    change_tensors(value, [&](const at::Tensor& result) {
      any = true;
      all = all && is_view_of_given(result, trial);
    });
  }
  return any && all;
}

} // namespace fsdp::engine
