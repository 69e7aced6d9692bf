#include "fsdp1/root_call.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <fsdp/front_end.h>

#include "base/check.h"
#include "engine/internal_scope.h"
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

void set_dtype(at::Tensor buffer, c10::ScalarType dtype) {
  const engine::InternalScope scope;
  buffer.set_data(buffer.to(dtype));
}

/// Which dtypes the units' policies give to the buffers below a module.
class BufferDtypes {
 public:
  explicit BufferDtypes(Impl& root) : root_(root) {
    for (const auto& each : root.options.ignored_modules) {
      ignored_.push_back(&each.for_operation("forward"));
    }
  }

  void lower(torch::nn::Module& module, const std::string& path, std::optional<c10::ScalarType> dtype) {
    if (std::find(ignored_.begin(), ignored_.end(), &module) != ignored_.end()) {
      return;
    }
    const auto unit = nn::registry::find(module);
    if (const auto instance = unit ? instances::find(unit) : nullptr) {
      dtype = instance->options.mixed_precision.buffer_dtype;
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      const at::Tensor& buffer = item.value();
      if (dtype && buffer.defined() && buffer.is_floating_point() && buffer.scalar_type() != *dtype) {
        root_.lowered_buffers.emplace(path + item.key(), buffer.scalar_type());
        set_dtype(buffer, *dtype);
      }
    }
    for (const auto& item : module.named_children()) {
      lower(*item.value(), path + item.key() + ".", dtype);
    }
  }

 private:
  Impl& root_;
  std::vector<const torch::nn::Module*> ignored_;
};

void lower_buffers(Impl& root, torch::nn::Module& module) {
  BufferDtypes(root).lower(module, "", std::nullopt);
}

void restore_buffers(Impl& root, torch::nn::Module& module) {
  for (const auto& item : module.named_buffers()) {
    if (const auto found = root.lowered_buffers.find(item.key()); found != root.lowered_buffers.end()) {
      set_dtype(item.value(), found->second);
    }
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
  in_full ? restore_buffers(root, module) : lower_buffers(root, module);
  root.in_full_precision = in_full;
}

// At the first call, when all units are there.
void initialize(Impl& root) {
  if (std::exchange(root.is_initialized, true)) {
    return;
  }
  torch::nn::Module& module = root.module("forward");
  const auto all = instances::below(module);
  check_homogeneous(all, "use_orig_params", [](const auto& options) { return options.use_orig_params; });
  check_homogeneous(all, "limit_all_gathers", [](const auto& options) { return options.limit_all_gathers; });
}

} // namespace

void prepare(Impl& root) {
  initialize(root);
  follow_training(root);
}

} // namespace fsdp::root_call
