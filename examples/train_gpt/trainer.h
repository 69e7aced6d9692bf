#pragma once

#include <chrono>
#include <optional>

#include <fsdp/fully_shard.h>
#include <fsdp/optim.h>

#include "batches.h"
#include "history.h"
#include "memory.h"
#include "model.h"
#include "options.h"
#include "schedule.h"
#include "team.h"

namespace train_gpt {

/// The model, its optimizer, and how they take a step. The same code trains a sharded model and an unsharded one.
class Trainer {
 public:
  Trainer(const Options& options, const Batches& batches, const Team& team);

  /// Goes on after the step that a checkpoint ends with: the same rows each step, on whatever number of ranks.
  void go_on(const StepRecord& last, int64_t rows_per_step);
  /// Rows of a micro-batch, of all ranks together.
  int64_t rows_per_step() const {
    return rows_ * team_.size();
  }
  /// One optimizer step; `index` counts from 0.
  StepRecord step(int64_t index);
  /// Whether any rank was asked to stop by the end of the last step. The same answer on every rank.
  bool asked_to_stop() const {
    return asked_to_stop_;
  }
  GPT& model() {
    return model_;
  }
  torch::optim::Optimizer& optimizer() {
    return *optimizer_;
  }
  bool sharded() const {
    return root_.has_value();
  }

 private:
  void set_learning_rate(double rate);
  double compute_gradients(int64_t index);
  double compute_gradients(int64_t index, int64_t rank);
  double clip();

  const Options& options_;
  const Batches& batches_;
  const Team& team_;
  Schedule schedule_;
  int64_t rows_; // of a micro-batch, of one rank
  GPT model_;
  std::optional<fsdp::FSDPModule> root_; // empty: not sharded
  std::unique_ptr<fsdp::optim::AdamW> optimizer_;
  GradientMean mean_; // not sharded: of the ranks' gradients
  MemoryGauge memory_;
  bool asked_to_stop_ = false;
  std::optional<std::chrono::steady_clock::time_point> began_;
};

} // namespace train_gpt
