#include "fsdp1/root_call.h"

#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

#include <torch/nn/module.h>

#include <fsdp/front_end.h>

#include "base/check.h"
#include "nn/lowered_buffers.h"
#include "nn/registry.h"

namespace fsdp::root_call {

namespace {

using Impl = FSDPInstance::Impl;

template <typename Attribute>
void check_homogeneous(const std::vector<std::shared_ptr<Impl>>& all, const char* name, const Attribute& attribute) {
  for (const auto& instance : all) {
    FSDP_CHECK(
        attribute(instance->options) == attribute(all[0]->options),
        "[FullyShardedDataParallel] Expects one homogeneous value for {} but found both true and false: give all units "
        "of a model the same",
        name);
  }
}

/// Which dtypes the units' policies give to the buffers below a module: each the nearest one's, once.
class BufferDtypes {
 public:
  explicit BufferDtypes(torch::nn::Module& root) {
    for (const auto& instance : instances::below(root)) {
      for (const auto& ignored : instance->options.ignored_modules) {
        seen_.insert(&ignored.for_operation("forward"));
      }
    }
  }

  void lower(torch::nn::Module& module, std::optional<c10::ScalarType> dtype) {
    if (!seen_.insert(&module).second) {
      return;
    }
    const auto unit = nn::registry::find(module);
    if (const auto instance = unit ? instances::find(unit) : nullptr) {
      dtype = instance->options.mixed_precision.buffer_dtype;
    }
    for (const auto& child : module.children()) {
      lower(*child, dtype);
    }
    for (const auto& buffer : module.buffers(/*recurse=*/false)) {
      if (seen_.insert(buffer.unsafeGetTensorImpl()).second && dtype && buffer.is_floating_point()) {
        nn::lowered_buffers::lower(buffer, *dtype);
      }
    }
  }

 private:
  std::unordered_set<const void*> seen_;
};

void lower_buffers(torch::nn::Module& root) {
  BufferDtypes(root).lower(root, std::nullopt);
}

void restore_buffers(const torch::nn::Module& root) {
  for (const auto& buffer : root.buffers()) {
    nn::lowered_buffers::restore(buffer);
  }
}

// Units and buffers of a model in evaluation have full precision, where FSDP_USE_FULL_PREC_IN_EVAL asked for it.
void follow_training(Impl& root) {
  torch::nn::Module& module = root.module("forward");
  const bool in_full = root.full_precision_in_eval && !module.is_training();
  if (root.in_full_precision == in_full) {
    return;
  }
  for (const auto& instance : instances::below(module)) {
    const auto& precision = instance->options.mixed_precision;
    compute_in(FSDPModule(instance->unit("forward")), in_full ? std::nullopt : precision.param_dtype);
  }
  in_full ? restore_buffers(module) : lower_buffers(module);
  root.in_full_precision = in_full;
}

// At the first call, when all units are there.
void initialize(Impl& root) {
  if (root.is_initialized) {
    return;
  }
  torch::nn::Module& module = root.module("forward");
  const auto all = instances::below(module);
  check_homogeneous(all, "use_orig_params", [](const auto& options) { return options.use_orig_params; });
  check_homogeneous(all, "limit_all_gathers", [](const auto& options) { return options.limit_all_gathers; });
  root.is_initialized = true;
}

} // namespace

void prepare(Impl& root) {
  initialize(root);
  follow_training(root);
}

} // namespace fsdp::root_call
