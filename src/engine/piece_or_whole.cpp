// A module's own methods take its registered tensors for wholes. `torch::load` gives each the data of the file's tensor
// (`set_`); `Module::clone` gives each parameter of a new module the data of a copy. With shards among them, a whole
// would become a shard's data, or a piece a parameter's: an error here, where it happens. What handles are given, where
// these are registered, are wholes.

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>

#include "base/caller.h"
#include "base/check.h"
#include "engine/flat_bucket.h"
#include "engine/interposer.h"
#include "engine/param.h"
#include "engine/piece_or_whole.h"
#include "engine/runtime.h"
#include "engine/tenant.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

bool has_sizes_of_whole(const at::Tensor& tensor, const Param& param) {
  return tensor.sizes() == c10::IntArrayRef(param.layout().sizes());
}

void check_new_data(const Param& param, const at::Tensor& data) {
  const at::Tensor& shard = param.shard();
  FSDP_CHECK(
      data.sizes() == shard.sizes() || !has_sizes_of_whole(data, param),
      "[torch::load] expected this rank's piece of '{}', of sizes {}, got the whole, of sizes {}: load a model's file "
      "before fully_shard, or on all ranks in the scope of `auto guard = fsdp::summon_full_params(model);`",
      param.name(),
      shard.sizes(),
      data.sizes());
}

bool is_same_view(const at::Tensor& one, const at::Tensor& other) {
  return one.has_storage() && other.has_storage() &&
         one.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         one.sizes() == other.sizes() && one.strides() == other.strides() &&
         one.storage_offset() == other.storage_offset();
}

void set_tensor(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const at::Tensor tensor = torch::jit::peek(*stack, 0, 2).toTensor(), data = torch::jit::peek(*stack, 1, 2).toTensor();
  Param* param = param_of_shard(tensor);
  if (param != nullptr) {
    called_by_torch([&] { check_new_data(*param, data); });
  }
  bool gave_values = false;
  called_by_torch([&] { gave_values = give_values(tensor, data); });
  if (gave_values) {
    torch::jit::drop(*stack, 1); // and the tensor is what the operator returns
    return;
  }
  FlatShard* flat = flat_shard_of(tensor);
  intercept(op, keys, stack);
  if (param != nullptr) {
    const auto lock = param->unit().runtime().lock();
    param->shard_was_given_data();
  } else if (flat != nullptr && flat->tensor().is_same(tensor)) {
    const auto lock = flat->bucket().unit().runtime().lock();
    flat->was_given_data();
  }
}

/// What an operator last made of a shard, on this thread.
struct ShardCopy {
  WeakTensor copy;
  std::vector<int64_t> whole_sizes;
  std::string name;
};

std::optional<ShardCopy>& last_copy() {
  static thread_local std::optional<ShardCopy> copy;
  return copy;
}

void copy_shard(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Param* param = param_of_shard(torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor());
  const bool is_piece = param != nullptr && !has_sizes_of_whole(param->shard(), *param);
  const auto whole_sizes = is_piece ? param->layout().sizes() : std::vector<int64_t>();
  const auto name = is_piece ? param->name() : std::string();
  intercept(op, keys, stack);
  if (is_piece) {
    const at::Tensor& copy = stack->back().toTensor();
    last_copy() = ShardCopy{WeakTensor(copy.getIntrusivePtr()), whole_sizes, name};
  }
}

} // namespace

// They may be what another handle shows (`target->weight.set_data(online->weight)`), which comes and goes.
bool give_values(const at::Tensor& handle, const at::Tensor& data) {
  Param* param = param_of(handle);
  if (param == nullptr || !param->is_handle(handle) || !param->takes_values_of_handle() || is_same_view(handle, data)) {
    return false;
  }
  const c10::AutoGradMode no_grad(false);
  const at::Tensor values = param_of(data) == nullptr ? data : data.clone();
  const auto lock = param->unit().runtime().lock();
  param->take_values(values);
  return true;
}

void check_is_no_piece(const at::TensorBase& tensor, const at::TensorBase& data) {
  const auto& piece = last_copy();
  FSDP_CHECK(
      !piece || piece->copy._unsafe_get_target() != data.unsafeGetTensorImpl() ||
          tensor.sizes() != c10::IntArrayRef(piece->whole_sizes),
      "[Module::clone] expected a module that is not sharded, got one where '{}' is: its copy would consist of this "
      "rank's pieces. Use fsdp::clone(model), or model->clone() in the scope of `auto guard = "
      "fsdp::summon_full_params(model);`",
      piece->name);
}

} // namespace fsdp::engine

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  using namespace fsdp::engine;
  library.impl("set_.source_Tensor", torch::CppFunction::makeFromBoxedFunction<&set_tensor>());
  library.impl("clone", torch::CppFunction::makeFromBoxedFunction<&copy_shard>());
  library.impl("to.dtype_layout", torch::CppFunction::makeFromBoxedFunction<&copy_shard>());
}
