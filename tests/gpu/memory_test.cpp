// What the GPU's allocator gives to a sharded model is what `describe` predicts.

#include <c10/core/CachingDeviceAllocator.h>

#include "gpu/gpus.h"

namespace fsdp::testing {
namespace {

class MemoryOfGpus : public OnGpus, public ::testing::WithParamInterface<int> {};

INSTANTIATE_TEST_SUITE_P(Ranks, MemoryOfGpus, ::testing::Values(1, 2, 4), ::testing::PrintToStringParamName());

constexpr int64_t kWidth = 2048, kLayers = 12; // so much that units which stay whole are beyond the bound

c10::DeviceAllocator& allocator() {
  return *c10::getDeviceAllocator(c10::kCUDA);
}

int64_t bytes(bool peak) {
  const auto stat = allocator().getDeviceStats(device().index()).requested_bytes[0];
  return peak ? stat.peak : stat.current;
}

/// The most bytes of a step of training, but for activations.
void expect_bound(const FullyShardOptions& options) {
  const int64_t before = bytes(/*peak=*/false);
  torch::nn::Sequential model;
  for (int i = 0; i < kLayers; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  }
  for (const auto& layer : *model) {
    fully_shard(*layer.ptr(), options);
  }
  fully_shard(*model, options);
  const Description description = describe(*model);
  EXPECT_LE(bytes(/*peak=*/false) - before, description.bytes_shard);
  const auto x = torch::ones({1, kWidth}, torch::TensorOptions().device(device()));
  for (int step = 0; step < 3; ++step) {
    allocator().resetPeakStats(device().index());
    model->forward(x.to(options.mp_policy.param_dtype.value_or(torch::kFloat))).sum().backward();
    torch::cuda::synchronize();
    const int64_t most = bytes(/*peak=*/true) - before;
    // A collective has a buffer of a unit's size, and cuBLAS its workspace.
    const int64_t for_collectives = 3 * description.units[0].bytes_whole, others = int64_t{36} << 20;
    EXPECT_LE(most, description.bytes_peak + for_collectives + others) << "in step " << step << "\n"
                                                                       << description.str();
    if (rank() == 0) {
      std::cout << "step " << step << ": " << most / 1e6 << " MB at most, of " << description.bytes_peak / 1e6
                << " predicted" << std::endl;
    }
    for (const auto& shard : model->parameters()) {
      shard.mutable_grad() = at::Tensor();
    }
  }
}

TEST_P(MemoryOfGpus, IsWhatIsPredicted) {
  on_gpus(GetParam(), [] {
    expect_bound({});
    expect_bound({.reshard_after_forward = false});
    expect_bound({.mp_policy = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
  });
}

} // namespace
} // namespace fsdp::testing
