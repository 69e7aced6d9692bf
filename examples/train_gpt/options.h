#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/ScalarType.h>
#include <fsdp/policy.h>

#include "model.h"

namespace train_gpt {

struct Options {
  GPTConfig model;

  std::string data; ///< empty: a text that Python brings along

  int64_t steps = 800;
  int64_t batch = 8; ///< sequences per rank and micro-batch
  int64_t accumulate = 1; ///< micro-batches per step
  double lr = 0; ///< at its highest
  int64_t warmup = 40; ///< steps
  double weight_decay = 0.1;
  double clip = 1.0; ///< 0: no clipping
  int64_t seed = 1;

  std::string backend;
  std::string device;
  bool fsdp1 = false; ///< shard by FullyShardedDataParallel
  std::vector<int64_t> mesh; ///< empty: all ranks in one dimension
  fsdp::ReshardAfterForward reshard_after_forward;
  std::optional<c10::ScalarType> param_dtype;
  std::optional<c10::ScalarType> reduce_dtype;
  bool offload = false;
  int64_t threads = 0; ///< 0: the cores divided among the ranks, unless OMP_NUM_THREADS says otherwise

  bool single = false; ///< plain LibTorch in one process
  int64_t ranks = 1; ///< with `single`: how many ranks' batches to compute

  std::string save; ///< folder of the run's checkpoints; empty: none are written
  int64_t save_every = 0; ///< steps; 0: only at the end
  int64_t keep_last = 2; ///< checkpoints; 0: all
  bool resume = false;

  std::string init_from; ///< folder of the weights to begin with; empty: random ones
  std::string export_to; ///< folder for the weights at the end; empty: none

  std::string out; ///< folder of what the run writes
  std::string report; ///< empty: report.html in `out`
  int64_t sample = 300; ///< bytes to write at the end

  bool help = false;
  /// All options as text, for the report.
  std::vector<std::pair<std::string, std::string>> values;
};

/// Throws fsdp::Error for options that make no sense.
Options parse_options(int argc, char** argv);
std::string help_text();

} // namespace train_gpt
