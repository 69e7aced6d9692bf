#pragma once

#include "nn/parity.h"
#include "nn/subjects.h"

/// A subject that FullyShardedDataParallel has sharded, beside its unsharded training: whatever `parameters()` shows.
namespace fsdp::testing {

/// Losses of each step, whole gradients and parameters at the end.
inline void train_wrapped(
    const Trial& trial, const Reference& reference, const std::function<FSDPModule(Subject&)>& wrap) {
  Subject subject = make_to_shard(trial);
  barrier(); // nobody draws random numbers before all have their weights
  const FSDPModule root = wrap(subject);
  torch::optim::AdamW optimizer(subject.module->parameters(), torch::optim::AdamWOptions(1e-2));
  const int backwards = backwards_of(trial.accumulate);
  std::vector<at::Tensor> losses;
  for (int step = 0; step < trial.steps; ++step) {
    optimizer.zero_grad();
    for (int micro = 0; micro < backwards; ++micro) {
      const auto instances = fsdp_modules(subject.module, /*root_only=*/true);
      std::optional<FSDPInstance::NoSync> no_sync;
      if (trial.accumulate == Accumulate::kNoSync && micro + 1 < backwards && !instances.empty()) {
        no_sync.emplace(instances[0].no_sync());
      }
      auto loss = subject.loss(rank(), step * backwards + micro);
      loss.backward();
      losses.push_back(loss.detach());
    }
    if (step + 1 < trial.steps) {
      optimizer.step();
      continue;
    }
    const auto guard = fsdp::summon_full_params(subject.module, {.writeback = false, .with_grads = true});
    for (const auto& item : subject.module->named_parameters()) {
      expect_same(item.value().grad(), reference.gradients.back().at(item.key()), "gradient of " + item.key());
    }
  }
  optimizer.step();
  expect_losses(losses, reference, trial);
  const auto guard = fsdp::summon_full_params(subject.module, {.writeback = false});
  const auto wholes = subject.module->named_parameters();
  EXPECT_EQ(wholes.size(), reference.tensors);
  for (const auto& item : wholes) {
    expect_same(item.value().detach(), reference.parameters.at(item.key()), "parameter " + item.key());
  }
}

} // namespace fsdp::testing
