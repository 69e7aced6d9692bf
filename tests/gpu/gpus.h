#pragma once

#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fsdp/fsdp.h>

#include "nn/parity.h"
#include "support/ranks.h"

/// Ranks that train on GPUs, over NCCL.
namespace fsdp::testing {

/// Is skipped where there is none.
class OnGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) {
      GTEST_SKIP() << "there is no GPU";
    }
  }
};

/// Each rank has a GPU of its own if there are enough, or all share the first. NCCL refuses that for ranks of one host,
/// and takes those with another name for it to be of another.
inline void join_on_gpus() {
  const int ranks = std::atoi(std::getenv("WORLD_SIZE"));
  const bool shared = static_cast<int>(torch::cuda::device_count()) < ranks;
  if (shared) {
    setenv("NCCL_HOSTID", ("rank" + std::to_string(process_rank())).c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  }
  at::globalContext().setDeterministicCuDNN(true);
  init({.device = shared ? "cuda:0" : "cuda"});
  device_of_inputs = device();
  // Memory that matrix products keep, and CUDA itself, are there before anybody counts.
  const auto weight = torch::ones({16, 16}, at::TensorOptions().device(device()).requires_grad(true));
  torch::mm(weight, weight).sum().backward();
}

/// The same sums each time, also where two streams multiply matrices.
inline const std::map<std::string, std::string> kDeterministic{{"CUBLAS_WORKSPACE_CONFIG", ":4096:8"}};

inline void on_gpus(int ranks, const std::function<void()>& body, ProcessOptions options = {}) {
  options.timeout = std::chrono::minutes(5);
  options.environment.insert(kDeterministic.begin(), kDeterministic.end());
  on_processes(
      ranks,
      [&] {
        join_on_gpus();
        body();
        shutdown();
      },
      options);
}

} // namespace fsdp::testing
