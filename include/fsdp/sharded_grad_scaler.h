#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>

namespace torch::optim {
class Optimizer;
}
namespace torch::serialize {
class InputArchive;
class OutputArchive;
} // namespace torch::serialize

namespace fsdp {

class Group;

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2; ///< of the scale, after `growth_interval` steps in a row without an overflow
  double backoff_factor = 0.5; ///< of the scale, after an overflow
  int64_t growth_interval = 2000;
  bool enabled = true; ///< false: `step` is the optimizer's own, all else does nothing
  std::shared_ptr<Group> group = nullptr; ///< ranks that skip their steps together; unset: all ranks of the job
};

/// Training in float16 without gradients that vanish: losses are scaled up before the backward, gradients down after
/// it, and a step whose gradients overflowed anywhere is skipped everywhere. For sharded and for plain parameters.
///
///     scaler.scale(loss).backward();
///     scaler.step(optimizer);
///     scaler.update();
class FSDP_API ShardedGradScaler {
 public:
  explicit ShardedGradScaler(GradScalerOptions options = {});
  ~ShardedGradScaler();

  /// Keeps the dtype.
  at::Tensor scale(const at::Tensor& loss) const;
  /// Divides the optimizer's gradients by the scale, to clip or to look at them before `step`. Collective.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// `optimizer.step()`, after `unscale_` unless that was called. Undefined if the step was skipped. Collective.
  at::Tensor step(torch::optim::Optimizer& optimizer);
  /// Once after the steps of all optimizers: adapts the scale, or sets it.
  void update(std::optional<double> new_scale = std::nullopt);

  bool is_enabled() const {
    return options_.enabled;
  }
  double get_scale() const {
    return options_.enabled ? scale_ : 1;
  }
  double get_growth_factor() const {
    return options_.growth_factor;
  }
  void set_growth_factor(double factor) {
    options_.growth_factor = factor;
  }
  double get_backoff_factor() const {
    return options_.backoff_factor;
  }
  void set_backoff_factor(double factor) {
    options_.backoff_factor = factor;
  }
  int64_t get_growth_interval() const {
    return options_.growth_interval;
  }
  void set_growth_interval(int64_t interval) {
    options_.growth_interval = interval;
  }

  /// The scale, what changes it, and the steps since it changed.
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

 private:
  enum class Stage : char { kReady, kUnscaled, kStepped };
  struct Progress {
    Stage stage = Stage::kReady;
    bool overflowed = false;
  };

  GradScalerOptions options_;
  double scale_;
  int64_t steps_without_overflow_ = 0;
  std::map<const torch::optim::Optimizer*, Progress> progress_; // since the last update
};

/// For `torch::save(scaler, path)` and `torch::load(scaler, path)`.
FSDP_API torch::serialize::OutputArchive& operator<<(
    torch::serialize::OutputArchive& archive, const ShardedGradScaler& scaler);
FSDP_API torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, ShardedGradScaler& scaler);

} // namespace fsdp
