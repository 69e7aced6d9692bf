#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

namespace train_gpt {

/// The ranks whose batches make up a step: those of the job, or, with --single, as many as asked for, which this one
/// process computes one after another.
class Team {
 public:
  static Team of_the_job();
  static Team in_one_process(int64_t ranks);

  int64_t size() const {
    return size_;
  }
  /// The ranks whose batches this process computes.
  const std::vector<int64_t>& mine() const {
    return mine_;
  }
  bool leads() const {
    return mine_.front() == 0;
  }
  /// Ranks that share this machine's cores.
  int64_t on_this_host() const;
  /// Adds up every process's numbers, position by position.
  std::vector<double> sum(const std::vector<double>& values) const;
  /// Whether it holds on some process. The same answer on every one.
  bool any(bool holds) const {
    return sum({holds ? 1.0 : 0.0})[0] > 0;
  }
  /// Throws fsdp::Error unless every process gives the same.
  void expect_same(const std::string& value, const std::string& what) const;

 private:
  Team(int64_t size, std::vector<int64_t> mine) : size_(size), mine_(std::move(mine)) {}

  int64_t size_;
  std::vector<int64_t> mine_;
};

/// The mean of several ranks' gradients, computed in one process as a sharded run computes it: added in rank order,
/// then divided.
class GradientMean {
 public:
  /// Takes the gradients away from the parameters.
  void take(const std::vector<torch::Tensor>& parameters);
  /// Gives the parameters the mean of what was taken, and forgets it.
  void give(const std::vector<torch::Tensor>& parameters);

 private:
  std::vector<torch::Tensor> sums_;
  int64_t taken_ = 0;
};

} // namespace train_gpt
