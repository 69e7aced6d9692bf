#include <fsdp/sharded_grad_scaler.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <fsdp/group.h>
#include <fsdp/init.h>
#include <fsdp/sharded_tensor.h>

#include "base/check.h"

namespace fsdp {

namespace {

/// Gradients that one operator takes.
struct AlikeGradients {
  c10::ScalarType dtype;
  c10::Device device;
  std::vector<at::Tensor> gradients;
};

// Several entries of a sparse gradient may be of one row, whose sum is what may overflow.
at::Tensor values_of(at::Tensor& gradient) {
  if (gradient.is_sparse()) {
    gradient = gradient.coalesce();
    return gradient._values();
  }
  return gradient;
}

std::vector<AlikeGradients> lists_of_gradients(torch::optim::Optimizer& optimizer) {
  std::vector<AlikeGradients> lists;
  std::unordered_set<const c10::TensorImpl*> seen; // `Module::parameters()` lists a weight as often as modules share it
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) {
      if (!parameter.mutable_grad().defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) {
        continue;
      }
      const at::Tensor values = values_of(parameter.mutable_grad());
      const auto fits = [&](const AlikeGradients& list) {
        return list.dtype == values.scalar_type() && list.device == values.device();
      };
      auto list = std::find_if(lists.begin(), lists.end(), fits);
      if (list == lists.end()) {
        list = lists.insert(lists.end(), {values.scalar_type(), values.device(), {}});
      }
      list->gradients.push_back(values);
    }
  }
  return lists;
}

// Where the group's collectives work: the same on all ranks that have sharded parameters, also where there are no
// gradients, or offloaded ones.
c10::Device device_of_collectives(torch::optim::Optimizer& optimizer) {
  std::optional<c10::Device> of_plain;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (is_sharded(parameter)) {
        return sharded(parameter).mesh.device();
      }
      of_plain = of_plain.value_or(parameter.device());
    }
  }
  return of_plain.value_or(c10::kCPU);
}

// Whether any of this rank's gradients are not finite.
bool unscale(torch::optim::Optimizer& optimizer, double scale) {
  const c10::NoGradGuard no_grad;
  bool overflowed = false;
  for (AlikeGradients& list : lists_of_gradients(optimizer)) {
    const auto options = at::TensorOptions().dtype(at::kFloat).device(list.device);
    at::Tensor found = at::zeros({1}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(list.gradients, found, at::full({}, 1 / scale, options));
    overflowed = overflowed || found.item<float>() != 0;
  }
  return overflowed;
}

} // namespace

ShardedGradScaler::ShardedGradScaler(GradScalerOptions options)
    : options_(std::move(options)), scale_(options_.init_scale) {
  FSDP_CHECK(
      !options_.enabled || options_.growth_factor > 1,
      "[ShardedGradScaler] The growth factor must be > 1.0, and is {}: the scale is multiplied by it to grow",
      options_.growth_factor);
  FSDP_CHECK(
      !options_.enabled || options_.backoff_factor < 1,
      "[ShardedGradScaler] The backoff factor must be < 1.0, and is {}: the scale is multiplied by it to shrink",
      options_.backoff_factor);
}

ShardedGradScaler::~ShardedGradScaler() = default;

at::Tensor ShardedGradScaler::scale(const at::Tensor& loss) const {
  return options_.enabled ? loss * scale_ : loss;
}

void ShardedGradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    return;
  }
  Progress& progress = progress_[&optimizer];
  FSDP_CHECK(
      progress.stage != Stage::kUnscaled,
      "[unscale_] unscale_() has already been called on this optimizer since the last update(): call it once a step");
  FSDP_CHECK(
      progress.stage != Stage::kStepped,
      "[unscale_] unscale_() is being called after step(): call it before, or update() first");
  Group& group = options_.group ? *options_.group : *world();
  const bool overflowed = unscale(optimizer, scale_);
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device_of_collectives(optimizer));
  const at::Tensor anywhere = at::full({1}, overflowed ? 1.0 : 0.0, options);
  group.all_reduce(anywhere, ReduceOp::kMax, /*divide_by=*/1, Label{"unscale_", ""})->wait();
  progress = {Stage::kUnscaled, anywhere.item<float>() != 0};
}

at::Tensor ShardedGradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    return optimizer.step();
  }
  FSDP_CHECK(
      progress_[&optimizer].stage != Stage::kStepped,
      "[step] step() has already been called since the last update(): call update() after the optimizers' steps");
  if (progress_[&optimizer].stage == Stage::kReady) {
    unscale_(optimizer);
  }
  Progress& progress = progress_[&optimizer];
  progress.stage = Stage::kStepped;
  return progress.overflowed ? at::Tensor() : optimizer.step();
}

void ShardedGradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) {
    return;
  }
  const auto progress = std::exchange(progress_, {});
  if (new_scale) {
    scale_ = *new_scale;
    return;
  }
  FSDP_CHECK(
      !progress.empty(), "[update] No inf checks were recorded prior to update: call step(optimizer) before update()");
  if (std::any_of(progress.begin(), progress.end(), [](const auto& each) { return each.second.overflowed; })) {
    scale_ *= options_.backoff_factor;
    steps_without_overflow_ = 0;
  } else if (++steps_without_overflow_ == options_.growth_interval) {
    const double grown = scale_ * options_.growth_factor;
    scale_ = grown <= std::numeric_limits<float>::max() ? grown : scale_; // as gradients are scaled back in float32
    steps_without_overflow_ = 0;
  }
}

void ShardedGradScaler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("enabled", c10::IValue(options_.enabled));
  archive.write("scale", c10::IValue(scale_));
  archive.write("growth_factor", c10::IValue(options_.growth_factor));
  archive.write("backoff_factor", c10::IValue(options_.backoff_factor));
  archive.write("growth_interval", c10::IValue(options_.growth_interval));
  archive.write("steps_without_overflow", c10::IValue(steps_without_overflow_));
}

void ShardedGradScaler::load(torch::serialize::InputArchive& archive) {
  if (!options_.enabled) {
    return;
  }
  const auto read = [&](const std::string& key) {
    c10::IValue value;
    FSDP_CHECK(
        archive.try_read(key, value),
        "[ShardedGradScaler] the archive has no '{}': it is not one that a ShardedGradScaler was saved to",
        key);
    return value;
  };
  FSDP_CHECK(
      read("enabled").toBool(),
      "[ShardedGradScaler] the archive was saved from a disabled scaler, which has no state: load it where enabled is "
      "false, or begin with a new scale");
  scale_ = read("scale").toDouble();
  options_.growth_factor = read("growth_factor").toDouble();
  options_.backoff_factor = read("backoff_factor").toDouble();
  options_.growth_interval = read("growth_interval").toInt();
  steps_without_overflow_ = read("steps_without_overflow").toInt();
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const ShardedGradScaler& scaler) {
  scaler.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, ShardedGradScaler& scaler) {
  scaler.load(archive);
  return archive;
}

} // namespace fsdp
