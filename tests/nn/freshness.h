// What the tests of freshness share: where they run, the model, and both kinds of writes.
#pragma once

#include <chrono>
#include <mutex>
#include <thread>

#include "nn/parity.h"
#include "nn/subjects.h"

namespace fsdp::testing {

struct Setting {
  std::string backend; ///< empty: threads
  int ranks;
};

inline std::string name_of(const ::testing::TestParamInfo<Setting>& info) {
  return (info.param.backend.empty() ? "threads" : info.param.backend) + std::to_string(info.param.ranks);
}

inline void on_ranks(const Setting& setting, const std::function<void()>& body) {
  if (setting.backend.empty()) {
    on_threads(setting.ranks, body);
    return;
  }
  on_processes(setting.ranks, [&] {
    init({.backend = setting.backend, .device = "cpu", .timeout = std::chrono::seconds(60)});
    body();
    shutdown();
  });
}

class Freshness : public ::testing::TestWithParam<Setting> {};

inline void some_ranks_are_slower(int step) {
  if (step % world_size() == rank()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

inline std::recursive_mutex making; // ranks are threads, and random numbers the process's

inline torch::nn::Sequential stack_of(int layers, int64_t width = 6) {
  const std::scoped_lock lock(making);
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < layers; ++i) {
    model->push_back(torch::nn::Linear(width, width));
    model->push_back(torch::nn::Tanh());
  }
  return model;
}

inline constexpr float kRate = 0.125; // a power of two: products with it are exact, however they are computed

inline void with_an_operator(at::Tensor& parameter) {
  const torch::NoGradGuard no_grad;
  parameter.sub_(parameter.grad(), kRate);
}

// As kernels of other libraries do, and those that compilers generate.
inline void past_all_operators(at::Tensor& parameter) {
  const at::Tensor gradient = parameter.grad().contiguous();
  float* const values = parameter.data_ptr<float>();
  for (int64_t i = 0; i < parameter.numel(); ++i) {
    values[i] -= kRate * gradient.data_ptr<float>()[i];
  }
}

/// What is done with the model between the parts of a step.
using Between = std::function<void(torch::nn::Sequential&, int step)>;
inline const Between kNothing = [](torch::nn::Sequential&, int) {};

inline void expect_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(torch::equal(actual[i], expected[i])) << "rank " << rank() << ", value " << i;
  }
}

} // namespace fsdp::testing
